"""Plans whose collectives a CPU runtime would mix up are refused where they would be run on one, and only there."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import unity
from benchmarks.training import CASES
from unity.base.errors import PlanError
from unity.exec.compiled.entangled import entangled, line_of
from unity.pcg.ir.graph import BRANCHES
from unity.plan.step import can_run

pytestmark = pytest.mark.usefixtures("own_cache")


def planned(precision: str) -> tuple[unity.Plan, Any, Any]:
    case = CASES["dlrm on 2 groups"]
    task = case.task(precision)
    args = task.params, task.batches[0]
    return unity.optimize(task.loss, *args, machine=case.machine, search="captured", progress=False, **case.ways), task, args


def test_what_would_be_mixed_up_is_refused_with_both_places() -> None:
    with jax.enable_x64(True):
        plan, _, args = planned("float64")
        beside, inside = next(entangled(plan.program.pcg))
        assert (beside.kind, set(beside.axes)) == (inside.kind, set(inside.axes))
        assert not can_run(plan)
        branches = next(node for node in plan.program.pcg.nodes if node.kind == BRANCHES)
        assert branches.inside is not None
        changes = [n for n in branches.inside.nodes if not n.source and not any(v.node.source for v in n.operands)]
        assert changes  # of the types of inputs
        assert all(".py:" in line_of(node, plan.program.pcg) for node in changes)
        for call in (plan, jax.jit(plan), jax.jit(jax.grad(plan))):
            with pytest.raises(PlanError, match=r"cannot be run on CPU devices.*\n.*may have another at the same time"):
                call(*args)
        checked = plan.check().total  # compiled, it may be
        assert checked.predicted == checked.compiled


def test_what_is_in_order_runs() -> None:
    fastest, task, args = planned("float32")
    plan = next(plan for plan in fastest.frontier if not list(entangled(plan.program.pcg)))
    assert can_run(plan)
    assert float(plan(*args)) == pytest.approx(float(task.loss(*args)), rel=1e-5)


def test_of_what_is_asked_for_here_it_is_the_best_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for machines that are named are the best there are: they may run elsewhere."""
    case = CASES["dlrm on 2 groups"]
    task = case.task("float32")
    ask: Any = {"search": "captured", "pipelines": False, "branch_groups": 2, "progress": False}
    monkeypatch.setattr(unity.Machine, "local", lambda: case.machine)
    monkeypatch.setattr("unity.planning.request.can_run", lambda plan: True)
    best = unity.optimize(task.loss, task.params, task.batches[0], **ask)
    monkeypatch.setattr("unity.planning.request.can_run", lambda plan: plan.time > best.time)
    named = unity.optimize(task.loss, task.params, task.batches[0], machine=case.machine, seed=1, **ask)
    here = unity.optimize(task.loss, task.params, task.batches[0], seed=1, **ask)
    assert named.time == best.time
    assert here.time == min(p.time for p in best.frontier if p.time > best.time)
    monkeypatch.setattr("unity.planning.request.can_run", lambda plan: False)
    assert unity.optimize(task.loss, task.params, task.batches[0], seed=2, **ask).time == best.time
