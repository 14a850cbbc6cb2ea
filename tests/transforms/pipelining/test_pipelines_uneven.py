"""Stages of unequal numbers of layers: the same gradients, what was predicted sent, and chosen where they pay."""

from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import unity
from unity import Device, Machine
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PIPELINE
from unity.pcg.parallel.stages import ONE_F_ONE_B, SCHEDULES, TWO_BW, Mixed
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.plan.stream import Stream
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.transforms.pipelining import PipelineSource, pipelined
from unity.transforms.pipelining.step_padding import places

TREE = Machine.grid(2, 4)
WIDTH = 8


def loss(params, x, y):
    def step(carry, own):
        w, b = own
        return carry + jnp.tanh(carry @ w) * b, None

    x = lax.scan(step, x @ params["in"], (params["layers"], params["gain"]))[0]
    return ((x @ params["out"] - y) ** 2).mean()


def arguments(count, batch=16, width=WIDTH):
    rng = np.random.default_rng(count)
    shapes = {"in": (width, width), "layers": (count, width, width), "gain": (count, width), "out": (width, 3)}
    params = {name: jnp.asarray(rng.normal(size=s) / np.sqrt(width), jnp.float32) for name, s in shapes.items()}
    return params, *(jnp.asarray(rng.normal(size=(batch, n)), jnp.float32) for n in (width, 3))


def structs(*args):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


def planned(fn, args, along, micro_batches, kind) -> Plan:
    captured = capture(fn, *args)
    stages = 2 ** len(along)
    made = pipelined(PipelineSource(captured), 0, 0, along, micro_batches // stages, kind)
    search = Search(made.after.graph, captured.differentiated, TREE, Training())
    return Plan(PlanFamily(fn, made.before, search, 0.0, transformations=(made,)), search.fastest)


def close(found, wanted, most=2e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= most * max(1e-3, float(np.abs(b).max()))


@given(st.integers(1, 9), st.integers(0, 30))
def test_places_have_all_steps_in_order_and_empty_ones_last(stages, more):
    steps = stages + more
    found = places(steps, stages)
    assert [step for step, there in found if there] == list(range(steps))
    most = -(-steps // stages)
    assert len(found) == most * stages
    for k in range(stages):
        mine = found[k * most : (k + 1) * most]
        assert [there for there, _ in groupby(there for _, there in mine)] in ([True], [True, False])
        assert sum(there for _, there in mine) >= most - 1
        assert all(step == mine[-2][0] for step, there in mine if not there)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("count", "axes"), [(5, 1), *by_hand((7, 2), (9, 3))])
def test_gradients_are_those_of_the_program(count, axes, kind):
    args = arguments(count)
    plan = planned(loss, args, TREE.axes[-axes:], 16 if axes == 3 else 8, kind)
    found = (stream := Stream(plan)).finish(stream.start(*args)) if kind == TWO_BW else jax.jit(jax.value_and_grad(plan))(*args)
    close(found, jax.jit(jax.value_and_grad(loss))(*args))
    (node,) = [n for n in plan.program.pcg.nodes if n.kind == PIPELINE]
    assert node.inside is not None
    lines = {n.source.rpartition(":")[0].rpartition("/")[2] for n in node.inside.nodes if n.kind != "input"}
    assert lines == {"test_pipelines_uneven.py"}


@pytest.mark.usefixtures("as_users_compile")
def test_what_is_sent_and_held_was_predicted():
    found = planned(loss, structs(*arguments(7, batch=64, width=32)), TREE.axes[1:], 8, ONE_F_ONE_B).check()
    assert all(line.predicted == line.compiled for line in found.lines)
    assert found.timeline.step == pytest.approx(found.memory.total, rel=0.15)


def test_fewer_steps_than_stages_are_refused():
    with pytest.raises(Mixed, match="8 stages cannot share 5 steps"):
        pipelined(PipelineSource(capture(loss, *structs(*arguments(5)))), 0, 0, TREE.axes, 1)


def unrolled(params, x, y):
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return ((x - y) ** 2).mean()


def test_of_layers_that_are_written_out_all_may_be_in_stages(tmp_path):
    """Rather than one of them on all devices. Slow links between nodes make it pay."""
    machine = Machine.grid(
        2, 4, device=Device("slow", {"float32": 1e9}, 10**9, 1e9, 0.5, 0.0), intra=(1e9, 1e-7), inter=(4e6, 1e-3)
    )  # fmt: skip
    width = 64
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
    one = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((128, width), jnp.float32)
    args: tuple[Any, ...] = ({"layers": [one] * 7}, x, x)
    plan = unity.optimize(unrolled, *args, machine=machine, progress=False, search="captured", pipeline=unity.PipelineShape(2, 8))
    assert str(plan.program.pipelining).startswith(("2 stages of 3 to 4 layers", "2 stages of 3 layers"))
    plan.program.check_derivation()
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", unrolled, *args)
    assert again.program.pcg.key == plan.program.pcg.key
    assert str(again.program.pipelining) == str(plan.program.pipelining)
