"""Every error that users meet ends in one link into the documentation, and the link leads somewhere."""

from __future__ import annotations

import ast
import builtins
import importlib
import pickle
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_docs import DOCS, ROOT, sections

import unity
from unity.base.errors import LINK, IllTypedError, PlanError, UnityError
from unity.cli import main
from unity.substitutions.language.library import load as load_rules

EIGHT = unity.Machine.grid(1, 8, "a100")
# What all others raise is for users; these speak to other modules, or say of operands what JAX's functions do.
INTERNAL = (
    "pcg/", "exec/", "verify/", "search/solver/problem.py", "search/published.py", "baselines/", "diff/graph_diff",
    "substitutions/language/vocabulary.py", "substitutions/language/parallel_derivation.py",
)  # fmt: skip


def every_class(of: type = UnityError) -> Iterator[type[UnityError]]:
    yield of
    for one in of.__subclasses__():
        yield from every_class(one)


def leads_somewhere(link: str) -> bool:
    page, _, section = link.partition("#")
    return (DOCS / f"{page}.md").is_file() and (not section or section in sections(page))


def test_the_page_of_every_class_is_there() -> None:
    for module in pkgutil.walk_packages(unity.__path__, "unity."):
        importlib.import_module(module.name)
    found = set(every_class())
    assert len(found) > 12
    assert {(one.__name__, one.docs) for one in found if not leads_somewhere(one.docs)} == set()


def test_every_link_that_is_written_out_leads_somewhere() -> None:
    texts = [file.read_text() for file in (ROOT / "unity").rglob("*.py")]
    found = {link for text in texts for link in re.findall(r"\(docs: ([\w/#-]+)\)", text)}
    assert len(found) > 20
    assert {link for link in found if not leads_somewhere(link)} == set()


WORDS = st.text(st.characters(exclude_characters="()"), max_size=30)


@given(st.lists(st.tuples(WORDS, st.sampled_from(["", " (docs: types)", "\n (docs: plan#files)"]))))
def test_a_message_has_one_link_at_its_end_whatever_it_quotes(parts: list[tuple[str, str]]) -> None:
    message = "".join(text + link for text, link in parts)
    error = IllTypedError(message)
    links = [link for _, link in parts if link]
    assert str(error) == f"{error.reason} (docs: {error.link})"
    assert error.link == (re.findall(r"[\w#]+(?=\))", links[-1])[0] if links else IllTypedError.docs)
    assert LINK.findall(str(error)) == [error.link]
    assert str(PlanError(str(error))) == str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reason, again.link) == (str(error), error.reason, error.link)


def raised(path: Path) -> Iterator[tuple[int, str, str]]:
    """The exceptions of Python's own that a file raises: line, class, text."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            found = getattr(builtins, node.exc.func.id, None)
            if isinstance(found, type) and issubclass(found, Exception):
                yield node.lineno, node.exc.func.id, ast.get_source_segment(text, node) or ""


def test_what_users_call_raises_errors_of_unity() -> None:
    wrong = []
    for path in sorted((ROOT / "unity").rglob("*.py")):
        name = str(path.relative_to(ROOT / "unity"))
        if not name.startswith(INTERNAL):
            found = ((line, kind) for line, kind, text in raised(path) if "(docs: " not in text and not own(kind))
            wrong += [f"{name}:{line}: {kind}" for line, kind in found]
    assert wrong == []


def own(kind: str) -> bool:
    """What no user sees: a state that cannot be."""
    return kind == "AssertionError"


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


F = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")  # noqa: E731
ARGS = (F(8, 8), F(16, 8))


def planned(fn: Any = loss, *args: Any, **options: Any) -> unity.Plan:
    options = {"machine": EIGHT, "search": "captured", "progress": False, **options}
    return unity.optimize(fn, *(args or ARGS), **options)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "an objective": (lambda: planned(objective="fun"), "plan#options"),
    "a search": (lambda: planned(search="best"), "plan#options"),
    "a budget": (lambda: planned(search="unity", budget="long"), "plan#options"),
    "rules": (lambda: planned(search="unity", rules=3), "plan#options"),
    "a constraint": (lambda: planned(constraints=[3]), "plan#options"),
    "a pin": (lambda: planned(constraints=unity.pin("q", jax.sharding.PartitionSpec())), "constraints#paths"),
    "a level": (lambda: planned(constraints=unity.forbid("tensor", across="moon")), "constraints"),
    "memory": (lambda: planned(memory_limit=10.0), "memory#infeasible"),
    "a value": (lambda: planned(lambda w, x: w if x[0, 0] > 0 else x), "capture#values"),
    "an argument": (lambda: planned(loss, "w", F(2, 2)), "capture#leaves"),
    "a point": (lambda: planned().frontier[99], "plan#the-frontier"),
    "a path": (lambda: planned().explain("nothing"), "constraints#why"),
    "shapes": (lambda: planned()(jnp.ones((2, 2)), jnp.ones((2, 2))), "plan#shapes"),
    "a machine": (lambda: unity.Machine.preset("abacus"), "machines"),
    "a grid": (lambda: unity.Machine.grid(0, 8, "a100"), "machines"),
    "a file": (lambda: unity.load("none.json", loss, *ARGS), "plan#files"),
    "a folder": (lambda: planned().files.save("none/plan.json"), "plan#files"),
    "a page": (lambda: planned().files.report("none/plan.html"), "plan#files"),
    "a program": (lambda: planned().files.export("none/plan.py"), "plan#files"),
    "a library": (lambda: load_rules("none.json"), "write-rules"),
}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("call", "link"), WRONG.values(), ids=WRONG)
def test_errors_say_where_more_is_said(call: Callable[[], Any], link: str) -> None:
    with pytest.raises((UnityError, IndexError), match=rf"\(docs: {link}\)$"):
        call()


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("words", "link"),
    [
        ("fly", "command-line"),
        ("optimize nowhere:example --machine v100-1x8", "command-line"),
        ("optimize nowhere:example --machine abacus", "command-line"),
        ("explain none.json", "plan#files"),
        ("report none.json", "plan#files"),
        ("rules show nothing", "write-rules"),
    ],
)
def test_so_do_those_of_the_command_line(words: str, link: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        raise SystemExit(main(words.split()))  # as the script does
    assert end.value.code in (1, 2)
    assert capsys.readouterr().err.rstrip().endswith(f"(docs: {link})")
