"""Lines of two versions of one source: an edit moves lines, and what is at a line goes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st

from unity.diff.lines import BEFORE, SAME_LINES, renumbered, renumbering
from unity.diff.matching import matching
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.user_lines import line_behind
from unity.plan.summary import LiveBytes, Summary, Talk, Work

FUNCTIONS = ("tanh", "sin", "cos", "exp")
COUNT = 5  # weights
ARGUMENTS = ({f"w{k}": jax.ShapeDtypeStruct((16, 16), "float32") for k in range(COUNT)}, jax.ShapeDtypeStruct((8, 16), "float32"))


def statement(k: int) -> str:
    return f'    h = jnp.{FUNCTIONS[k % len(FUNCTIONS)]}(h @ params["w{k}"])'


def source(body: Sequence[str]) -> str:
    return "\n".join(["def f(params, h):", *body, "    return (h * h).sum()"])


def function(text: str) -> Callable[..., Any]:
    names: dict[str, Any] = {"jnp": jnp}
    exec(compile(text, "/models/model.py", "exec"), names)
    return names["f"]


def graph_of(text: str) -> PCG:
    return capture(function(text), *ARGUMENTS).graph


def numbers(text: str) -> dict[str, str]:
    """The line of each statement, as it is shown to users."""
    return {line: f"model.py:{k} (f)" for k, line in enumerate(text.split("\n"), 1) if "=" in line or "return" in line}


@st.composite
def versions(draw: st.DrawFn) -> tuple[str, str]:
    """Two versions of a function: with other comments, and the second without some of the first's statements, or with more."""

    def body(chosen: list[int]) -> list[str]:
        lines: list[str] = []
        for k in chosen:
            lines += ["    # a comment"] * draw(st.integers(0, 2))
            lines.append(statement(k))
        return lines

    every = list(range(COUNT))
    edited = draw(st.sets(st.sampled_from(every), max_size=1))
    kept = [k for k in every if k not in edited]
    pair = source(body(every)), source(body(kept))
    return pair if draw(st.booleans()) else (pair[1], pair[0])


@given(versions())
@settings(max_examples=fewer(60), deadline=None)
def test_a_statement_of_both_versions_is_at_its_line_in_the_second(pair: tuple[str, str]) -> None:
    before, after = map(graph_of, pair)
    line = renumbering(before, after, matching(before, after))
    old, new = map(numbers, pair)
    for text, place in old.items():
        if text in new:
            assert line(place) == new[text], text
        else:  # not at the line of another statement
            assert line(place) not in new.values(), text


def test_a_removed_statement_whose_number_is_taken_is_named_apart() -> None:
    texts = [source([statement(k) for k in chosen]) for chosen in ((0, 1, 2), (0, 2))]
    before, after = map(graph_of, texts)
    line = renumbering(before, after, matching(before, after))
    assert line("model.py:3 (f)") == "model.py:3 (f)" + BEFORE  # the line of w2 now
    assert line("model.py:4 (f)") == "model.py:3 (f)"


def test_a_renamed_argument_is_named_as_in_the_second() -> None:
    text = source([statement(0), statement(1)])
    one, other = graph_of(text), capture(function(text.replace('"w1"', '"v"')), *renamed("w1", "v")).graph
    line = renumbering(one, other, matching(one, other))
    assert line("args[0]['w1']") == "args[0]['v']"
    assert line("args[0]['w0']") == "args[0]['w0']"


def renamed(old: str, new: str) -> tuple[Any, ...]:
    weights, x = ARGUMENTS
    return {new if name == old else name: shape for name, shape in weights.items()}, x


def test_rows_of_lines_that_become_one_are_added_up() -> None:
    text = source([statement(0)])
    work = (Work("a.py:1", "dot_general", 2, 1.0), Work("a.py:2", "dot_general", 1, 0.5), Work("a.py:2", "tanh", 1, 0.25))
    talk = (Talk("a.py:1", "all-gather", "d0", "forward of combine", 1, 64, 1.0),) * 2
    live = (LiveBytes("a.py:2", "tanh", "results", 8.0), LiveBytes("a.py:1", "tanh", "results", 4.0))
    summary = Summary("f", "m", 2, 2.0, 1.0, graph_of(text), work, talk, live=live)
    same = renumbered(summary, SAME_LINES)
    assert (same.work, same.live) == (work, live)
    joined = renumbered(summary, type(SAME_LINES)({"a.py:1": "a.py:2"}, {}, frozenset()))
    assert joined.work == (Work("a.py:2", "dot_general", 3, 1.5), Work("a.py:2", "tanh", 1, 0.25))
    assert joined.talk == (Talk("a.py:2", "all-gather", "d0", "forward of combine", 2, 64, 2.0),)
    assert joined.live == (LiveBytes("a.py:2", "tanh", "results", 12.0),)
    assert line_behind(joined.graph.outputs[0].node).startswith("model.py:")
