"""Computing that every device repeats is listed unasked, with its share of the step, its line and the reason."""

import io
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cli_models
import jax
import jax.numpy as jnp
import pipelined_models as models
import pytest
from jax.core import ShapedArray
from jax.extend.core import Primitive

import unity
from unity.base.formatting import short
from unity.cli import main
from unity.machine.machine import Machine
from unity.pcg.parallel.parallelize import on_one_device
from unity.pcg.parallel.serial_view import twins
from unity.plan.plan import Plan
from unity.plan.undivided import WORTH_SAYING, undivided
from unity.search.cost.prediction import predict

EIGHT = Machine.grid(1, 8, "a100")
FREE = replace(EIGHT, device=replace(EIGHT.device, launch=0.0))


def f(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def divided(w: Any, x: Any) -> Any:
    return (jnp.tanh(x @ w) ** 2).mean()


def sorting(w: Any, x: Any) -> Any:
    return divided(w, x) + jnp.sort(jnp.exp(w).reshape(-1)).sum()


def stepping(w: Any, x: Any) -> Any:
    """The steps of a loop sort all of a batch."""
    return jax.lax.scan(lambda total, b: (total + jnp.sort((b @ w).reshape(-1)).mean(), None), 0.0, x.reshape(4, -1, 1024))[0]


def beside(w: Any, x: Any) -> Any:
    """What is sorted along its samples, beside the same weights sorted whole."""
    return sorting(w, x) + jnp.sort((x @ w).T, 0).mean()


unknown = Primitive("unknown")
unknown.def_abstract_eval(lambda x: ShapedArray(x.shape, x.dtype))


def strange(w: Any, x: Any) -> Any:
    return divided(w, x) + unknown.bind(jax.lax.stop_gradient(x)).sum()


def planned(fn: Callable[..., Any], *args: Any, machine: Machine = EIGHT, **options: Any) -> Plan:
    return unity.optimize(fn, *args, machine=machine, budget=0, progress=False, **options)


def explained(plan: Plan, path: str | None = None) -> str:
    text = io.StringIO()
    plan.explain(path, file=text)
    return text.getvalue()


ODD, EVEN = (f(1023, 1025), f(77, 1023)), (f(1024, 1024), f(8192, 1024))


@pytest.mark.parametrize(("fn", "args"), [(sorting, EVEN), (stepping, EVEN), (divided, ODD), (divided, EVEN)])
def test_what_is_whole_takes_as_long_as_on_one_device(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Where launches cost nothing, what is divided takes less than it does alone."""
    plan = planned(fn, *args, machine=FREE)
    steps, alone = plan.program.family.differentiated, on_one_device(plan.program.serial)
    seconds_alone = {id(t.node): t.forward + t.backward for t in predict(alone, FREE.alone, steps).operators}
    before = {
        id(node): id(single)
        for (_, single), (_, node) in zip(
            twins(plan.program.serial, alone), twins(plan.program.serial, plan.program.pcg), strict=True
        )
    }
    found, total = defaultdict[tuple[str, str], float](float), 0.0
    for term in predict(plan.program.pcg, plan.inspect.machine, steps).operators:
        seconds = term.forward + term.backward
        total += seconds
        if seconds and seconds == pytest.approx(seconds_alone[before[id(term.node)]], rel=1e-9):
            found[term.node.kind, short(term.node.source)] += seconds
    wanted = {key: seconds / total for key, seconds in found.items()}
    rows = undivided(plan.program)
    if sum(wanted.values()) <= WORTH_SAYING:
        assert not rows
        assert "not divided" not in explained(plan)
    else:
        said = defaultdict[tuple[str, str], float](float)
        for row in rows:
            said[row.kind, row.line] += row.part
        assert dict(said) == pytest.approx(wanted)
        assert f"every device does all of {sum(wanted.values()):.0%} of the computing" in explained(plan)


@pytest.mark.parametrize(
    ("fn", "args", "kind", "reason"),
    [
        (sorting, EVEN, "sort", "none of its dimensions can be divided"),
        (stepping, EVEN, "sort", "none of its dimensions can be divided"),
        (divided, ODD, "dot_general", "no axis divides its dimensions"),
        (strange, EVEN, "unknown", "no entry for unknown in the operator table"),
    ],
)
def test_the_reason_is_said_beside_the_operator_and_its_line(fn: Callable[..., Any], args: tuple, kind: str, reason: str) -> None:
    plan = planned(fn, *args)
    (row,) = (row for row in undivided(plan.program) if row.kind.startswith(kind))
    assert row.reason == reason
    assert row.line.startswith("test_undivided.py:")
    said = explained(plan)
    assert said.index("not divided") < said.index("where arguments are stored")
    assert any(kind in line and reason in line and row.line in line for line in said.splitlines())


def test_what_could_be_divided_is_explained_by_the_path_that_is_named() -> None:
    plan = planned(beside, *EVEN)
    (reason,) = (row.reason for row in undivided(plan.program) if row.kind == "exp")
    path = reason.split('explain("')[1].split('")')[0]
    assert "exp" in explained(plan, path)


def test_stages_of_a_pipeline_are_divided() -> None:
    """Each device runs one stage, though no axis divides what is in it."""
    args = {"in": f(8, 8), "layers": f(4, 8, 8), "out": f(8, 8)}, f(64, 8), f(64, 8)
    plan = models.planned(models.loss, args, stages=2)
    stages = {
        id(n) for node, _ in plan.program.pcg.walk() if node.kind == "pipeline" and node.inside for n, _ in node.inside.walk()
    }
    shares = [
        t.share
        for t in predict(plan.program.pcg, plan.inspect.machine, plan.program.family.differentiated).operators
        if id(t.node) in stages
    ]
    assert shares
    assert max(shares) <= 0.5


def test_one_device_repeats_nothing() -> None:
    assert not undivided(planned(sorting, *EVEN, machine=EIGHT.alone).program)


def test_the_command_line_says_it_unasked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, own_cache: None) -> None:
    monkeypatch.setattr(cli_models, "small", lambda: (sorting, EVEN, {"search": "captured"}))
    assert main(["optimize", "cli_models:small", "--machine", "a100-1x8"]) == 0
    assert "not divided: every device does all of" in capsys.readouterr().out
