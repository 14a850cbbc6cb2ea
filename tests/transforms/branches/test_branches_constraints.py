"""Branches where the user constrains the plan: what is said holds, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ci_cases import by_hand
from jax.sharding import PartitionSpec as P
from stepped import stepped

import unity
from benchmarks.forked_layers import batch, loss, planned, weights
from benchmarks.models import get
from benchmarks.models.model import concrete
from unity.base.errors import InfeasibleError, OptionError
from unity.pcg.ir.graph import BRANCHES
from unity.transforms.branches import Branching

TREE = unity.Machine.grid(2, 4)

pytestmark = pytest.mark.usefixtures("own_cache")


def branched(**options: Any) -> unity.Plan:
    plan = planned(TREE, **(options if "pipeline" in options else {"pipelines": False, **options}))
    assert [n.kind for n in plan.program.pcg.nodes].count(BRANCHES) == 1
    return plan


def made(plan: unity.Plan) -> Branching:
    assert plan.program.branching is not None
    return plan.program.branching


def close(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def right(plan: unity.Plan) -> None:
    """The function's values and gradients, and what was predicted."""
    step, found = stepped(plan, weights(), batch())
    close(step, jax.jit(jax.value_and_grad(loss))(weights(), batch()))
    assert all(line.predicted == line.compiled for line in found.lines), str(found)


@pytest.mark.parametrize("options", [{"pipeline": unity.PipelineShape(2, 4)}, *by_hand({"pipelines": False})])
def test_a_pinned_argument_lies_as_it_is_pinned_and_is_not_packed(options: dict[str, Any]) -> None:
    free = branched(pack=True, **options)
    pins = [unity.pin("params['v2']", P("device", None)), unity.pin("batch['users']", P("node", None))]
    plan = branched(pack=True, **options, constraints=pins)
    assert plan.in_shardings[0]["v2"].spec == P(("d0", "d1"), None)
    assert plan.in_shardings[1]["users"].spec == P("n0", None)
    names = [path.rpartition("[")[2] for path in plan.program.family.captured.paths]
    packed = [{names[k] for s in made(p).packing.slots for k in s.leaves if k is not None} for p in (free, plan)]
    assert "'v2']" in packed[0]
    assert packed[1]
    assert "'v2']" not in packed[1]
    if "pipeline" in options:
        right(plan)


def test_what_is_pinned_is_packed_by_no_plan_from_a_file(tmp_path: Path) -> None:
    plan = branched(pack=True, constraints=unity.pin("params['u1']", P(None, "node")))
    plan.files.save(tmp_path / "plan.json")
    loaded = unity.load(tmp_path / "plan.json", loss, weights(), batch())
    assert loaded.program.pcg.key == plan.program.pcg.key
    assert loaded.program.packing == plan.program.packing
    plan.program.check_derivation()


def test_dimensions_may_be_forbidden_and_required_across_levels() -> None:
    forbidden = branched(constraints=unity.forbid("samples", across="device"))
    for spec in (s.spec for s in jax.tree.leaves(forbidden.in_shardings[1])):
        assert not {"d0", "d1"} & set(jax.tree.leaves(spec[0]))
    required = branched(constraints=unity.require("samples", across="device"))
    for spec in (s.spec for s in jax.tree.leaves(required.in_shardings[1])):
        assert {"d0", "d1"} <= set(jax.tree.leaves(spec[0]))
    right(forbidden)


def test_weights_that_may_not_be_split_across_groups_are_not_packed_there() -> None:
    plan = branched(pack=True, constraints=unity.forbid("weights", across="node"))
    assert made(plan).along != TREE.axes[:1]
    right(plan)


def test_a_constrained_value_is_in_no_branch() -> None:
    def fn(params: Any, batch: Any) -> Any:
        u = jax.nn.relu(batch["users"] @ params["u1"]) @ params["u2"]
        v = unity.constrain(jax.nn.relu(batch["items"] @ params["v1"]), P("device", None)) @ params["v2"] @ params["v3"]
        return ((u * v).sum(-1) ** 2).mean()

    options: dict[str, Any] = {"machine": TREE, "search": "captured", "progress": False}
    with pytest.raises(InfeasibleError, match="no branches"):
        unity.optimize(fn, weights(), batch(), branch_groups=2, **options)


def test_only_leaves_no_branches() -> None:
    options: dict[str, Any] = {"constraints": unity.only("samples", across="node"), "pipelines": False}
    with pytest.raises(OptionError, match=r"only\(\"samples\", across=\"node\"\) do not go together"):
        planned(TREE, **options)
    assert planned(TREE, **{**options, "branches": True}).program.branching is None


def test_candle_uno_with_a_pin() -> None:
    model = get("candle_uno", width=32, tower_layers=2, top_layers=2, cell=24, descriptors=40, fingerprints=16, batch=16)
    params, data = concrete(model)
    pin = unity.pin("args[0]['top'][*]**", P("node", None))
    options: dict[str, Any] = {"machine": TREE, "search": "captured", "progress": False, "branch_groups": 2, "pack": True}
    plan = unity.optimize(model.loss, params, data, constraints=pin, **options)
    assert plan.program.branching is not None
    assert all(s.spec[0] == "n0" for s in jax.tree.leaves(plan.in_shardings[0]["top"]))
    value, gradient = jax.jit(jax.value_and_grad(plan))(*plan.shard(params, data))
    close((value, plan.shard.unpack(gradient)), jax.jit(jax.value_and_grad(model.loss))(params, data))
