"""Memory of an eager backend: values made ahead, transposed, padded and copied, compared with compiled programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from small_models import Small, made, random_point, widens  # noqa: F401 (named in a condition)

from unity.machine.machine import Machine
from unity.optimize import optimize
from unity.pcg.capture.capture import capture
from unity.pcg.ir.gradient_flow import gradients
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value
from unity.pcg.parallel.parallelize import parallelize
from unity.plan.plan import Plan
from unity.search.cost.cost import Training
from unity.search.memory.backend import CPU, GPU
from unity.search.memory.eager_forward import Ahead, Forward, changes_at_start
from unity.search.memory.memory import MemoryPrediction, operator_memory, predict_memory
from unity.search.memory.peak import ReusableGradient
from unity.search.memory.residuals import Setting
from unity.search.memory.sweep import sweep
from unity.search.space.live_buffers import BACKEND, KEPT, NOTHING_MOVES, WIDENED, WORKING, AliasTables, Buffer, local

TARGET = 0.2  # of all bytes, as the search adds them up: what the benchmark asks for


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def some_node() -> Node:
    return capture(jnp.tanh, f(8)).graph.nodes[0]


NODE = some_node()


def held(nbytes: float) -> Buffer:
    return Buffer(WORKING, NODE, nbytes)


@st.composite
def forwards(draw: st.DrawFn) -> Forward:
    count = draw(st.integers(1, 12))
    nbytes = st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0])
    kept = draw(st.lists(st.lists(nbytes.map(held), max_size=3), min_size=count, max_size=count))
    started = draw(st.lists(st.just([]) | st.lists(nbytes.map(held), max_size=2), min_size=count, max_size=count))
    ahead = draw(st.lists(st.builds(Ahead, nbytes.map(held), st.integers(0, count - 1), st.integers(0, count)), max_size=8))
    own = draw(st.dictionaries(st.integers(0, count - 1), nbytes, max_size=count))
    later = draw(st.lists(st.builds(ReusableGradient, nbytes, st.integers(-1, count - 1)), max_size=6))
    return Forward(kept, started, ahead, own, sorted(later, key=lambda g: g.nbytes, reverse=True))


@given(forwards())
def test_the_forward_peak_is_that_of_brute_force(found: Forward) -> None:
    def here(at: int) -> float:
        there = sum(h.nbytes for h in found.held(at)) + found.own.get(at, 0.0)
        return there - sum(n for _, n in found.reused(at))

    at, reused = found.highest()
    assert reused == found.reused(at)
    assert here(at) == max(map(here, [-1, *found.own]))


def test_values_made_ahead_are_live_until_their_use() -> None:
    found = Forward([[], [], []], [[], [], []], [Ahead(held(8.0), 1, 3), Ahead(held(2.0), 2, 3)], {0: 1.0, 1: 1.0, 2: 1.0}, [])
    assert found.sizes() == {-1: 10.0, 0: 11.0, 1: 3.0, 2: 1.0}
    assert found.highest() == (0, [])


def planned(loss: Any, params: Any, x: Any) -> Plan:
    return optimize(loss, params, x, machine=Machine.grid(1, 8, "a100"), progress=False, rules=())


def predictions(plan: Plan) -> list[MemoryPrediction]:
    graph: PCG = plan.program.pcg
    return [predict_memory(graph, plan.program.family.captured.differentiated, Training(), backend) for backend in (GPU, CPU)]


def layers(params: Any, x: Any) -> Any:
    for up, down in params:
        x = x + jnp.tanh(x @ up) @ down
    return jnp.mean(x**2)


def convolutions(activation: Any) -> Any:
    def loss(kernels: Any, x: Any) -> Any:
        for kernel in kernels:
            x = activation(lax.conv_general_dilated(x, kernel, (1, 1), "SAME"))
        return jnp.mean(x**2)

    return loss


KERNELS = [f(16, 16, 3, 3)] * 3


@pytest.mark.usefixtures("as_users_compile")
def test_gathered_weights_are_live_early_on_an_eager_backend() -> None:
    """In plans that gather every weight for each use, all of them are live from the start."""
    frontier = planned(layers, [(f(256, 256), f(256, 256))] * 8, f(1024, 256)).frontier
    found = [predictions(plan) for plan in frontier]
    more = [on_cpu.step - on_gpu.step for on_gpu, on_cpu in found]
    assert max(more) >= 2 * 256 * 256 * 4
    assert abs(frontier[more.index(max(more))].check().memory_lines[-1].difference) <= TARGET


def recurrent(params: Any, x: Any) -> Any:
    """Two layers, each with one weight for all steps, in a lower precision."""

    def step(c: Any, x: Any, w: Any) -> Any:
        c = jnp.tanh(x + c @ w.astype(c.dtype))
        return c, c

    for w in params:
        x = lax.scan(lambda c, x, w=w: step(c, x, w), x[0], x)[1]
    return jnp.mean(x.astype(jnp.float32) ** 2)


WIDENS = pytest.mark.skipif("not widens()", reason="the compiler has products of bfloat16 here")


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=WIDENS)])
def test_the_memory_of_scans_is_that_of_the_compiled_program(dtype: Any) -> None:
    """With weights gathered before the first step, and residuals of steps widened where they are read so."""
    frontier = planned(recurrent, [f(256, 256)] * 2, jax.ShapeDtypeStruct((16, 16, 256), dtype)).frontier
    for plan in (frontier[0], frontier[-1]):
        assert abs(plan.check().memory_lines[-1].difference) <= TARGET


def test_weights_gathered_in_scans_are_live_from_the_start() -> None:
    most: set[int] = set()
    for plan in planned(recurrent, [f(256, 256)] * 2, f(16, 16, 256)).frontier:
        nodes = [n for n in plan.program.pcg.nodes if n.kind != "input"]
        inside = [n for scan in nodes if scan.inside for n in scan.inside.nodes]
        gathered = {id(n) for n in inside if n.kind.startswith("combine") and n.again}
        assert gathered <= {id(a.buffer.node) for a in changes_at_start(nodes, AliasTables(plan.program.pcg), ())}
        most = max(most, gathered, key=len)
    assert len(most) == 2  # of each layer's weight


def test_both_sides_of_a_change_of_type_are_live_at_once() -> None:
    plan = planned(layers, [(f(256, 256), f(256, 256))] * 4, f(2048, 256)).frontier[-1]
    flow = gradients(plan.program.pcg, plan.program.family.captured.differentiated)
    region = sweep(plan.program.pcg, Setting(plan.program.pcg, flow, True, CPU))
    both = {
        i: local(node.operands[0], plan.program.pcg) + local(Value(node), plan.program.pcg)
        for i, node in enumerate(region.nodes)
        if node.kind in PARALLELIZATION and node.kind not in NOTHING_MOVES and node.operands[0].node.kind != "input"
    }
    assert both
    assert all(region.forward[i] >= nbytes for i, nbytes in both.items())


def test_narrow_residuals_of_steps_are_kept_widened() -> None:
    x = jax.ShapeDtypeStruct((16, 16, 256), jnp.bfloat16)
    plan = optimize(recurrent, [f(256, 256)] * 2, x, machine=Machine.grid(1, 1, "a100"), progress=False)
    on_gpu, on_cpu = predictions(plan)
    assert WIDENED not in on_gpu.by_reason
    assert on_cpu.by_reason[WIDENED] == on_cpu.by_reason[KEPT] == on_gpu.by_reason[KEPT]


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize(("activation", "samples"), [(jnp.tanh, 8), (jax.nn.relu, 32), *by_hand((jnp.tanh, 32), (jax.nn.relu, 8))])
def test_the_memory_of_convolutions_is_that_of_the_compiled_program(activation: Any, samples: int) -> None:
    """Also those of one sample on each device, whose images are copied though nothing but a dimension of size 1 moves."""
    frontier = planned(convolutions(activation), KERNELS, f(samples, 16, 16, 16)).frontier
    for plan in (frontier[0], frontier[-1]):
        assert abs(plan.check().memory_lines[-1].difference) <= TARGET


def test_a_transposed_image_is_a_residual_beside_the_original() -> None:
    """A tanh's gradient reads what it made, the convolution's after it reads that in another order."""
    plan = planned(convolutions(jnp.tanh), KERNELS, f(32, 16, 16, 16))
    on_gpu, on_cpu = predictions(plan)
    image = 32 * 16 * 16 * 16 * 4 / 8
    graph = plan.program.pcg
    assert on_gpu.by_reason[BACKEND] == local(Value(graph.inputs[-1]), graph)  # of the argument alone
    assert on_cpu.by_reason[BACKEND] >= 2 * image


def classes(head: Any) -> Any:
    """Three layers, and the cross-entropy of what `head` makes of them: logits are most of what is held."""

    def loss(params: Any, batch: Any) -> Any:
        x, labels = batch
        for weight in params["layers"]:
            x = jnp.tanh(x @ weight)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(head(params, x)), labels[..., None], -1)
        return -jnp.mean(chosen)

    return loss


def narrow(params: Any, x: Any) -> Any:
    weight = params["out"].astype(jnp.bfloat16)
    return jnp.matmul(x.astype(jnp.bfloat16), weight, preferred_element_type=jnp.float32)


HEADS = {
    "alone": lambda p, x: x @ p["out"],
    "with a bias": lambda p, x: x @ p["out"] + p["bias"],
    "converted": narrow,
}


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize("name", sorted(HEADS))
def test_rows_are_added_to_the_gradient_of_logits_where_it_is(name: str) -> None:
    """No cotangent is there twice, in two orders or apart from the scattered one."""
    params = {"layers": [f(256, 256)] * 3, "out": f(256, 512), "bias": f(512)}
    batch = f(8, 64, 256), jax.ShapeDtypeStruct((8, 64), jnp.int32)
    plan = optimize(classes(HEADS[name]), params, batch, machine=Machine.grid(1, 1, "a100"), progress=False)
    check = plan.check()
    assert abs(check.memory_lines[-1].difference) <= TARGET / 2
    logits = 8 * 64 * 512 * 4
    assert sum(h.nbytes for h in check.timeline.held if h.why == WORKING and h.operator == "log_softmax") < logits


def test_zeros_for_gradients_of_slices_are_live_from_the_start_in_remats_too() -> None:
    """Of a value that every device has, each takes its slice."""

    def block(weight: Any, x: Any) -> Any:
        return jnp.tanh(x @ weight)

    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = jax.checkpoint(block)(weight, x)
        return jnp.mean(x**2)

    captured, assembled = made(Small(loss, [f(64, 64)] * 3, f(128, 64)))
    waiting = 0.0
    for seed in range(8):
        point = random_point(assembled, np.random.default_rng(seed))
        graph = parallelize(captured.graph, assembled.assignment(point))
        flow = gradients(graph, captured.differentiated)
        for found in operator_memory(graph, captured.differentiated, Training(), CPU):
            if (inside := found.node.inside) is not None:
                slices = [n.operands[0] for n in inside.nodes if n.operands and CPU.pads(n) and flow(n.operands[0])]
                zeros = sum(h.nbytes for h in found.kept if h.why == BACKEND)
                assert zeros == sum(local(v, inside) for v in slices)
                waiting += zeros
    assert waiting > 0
