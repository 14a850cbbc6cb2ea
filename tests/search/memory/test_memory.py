"""Predicted memory, compared with the sum of the search and with compiled programs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from small_models import MACHINE, MODELS, Small, counted, made, named, random_point

from unity.machine.machine import Machine
from unity.optimize import optimize
from unity.pcg.analysis.residuals import Residuals, recomputable, residuals
from unity.pcg.capture.capture import Captured, capture
from unity.pcg.ir.gradient_flow import gradients
from unity.pcg.ir.graph import PARALLELIZATION, Node, Value
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.types.parallel_type import local_shape, slice_count
from unity.search.cost.assembly import Assembled
from unity.search.cost.cost import Training
from unity.search.memory.backend import CPU, GPU, backend_of
from unity.search.memory.memory import MemoryPrediction, operator_memory, predict_memory
from unity.search.session import Search
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Point
from unity.search.space.live_buffers import ARGUMENTS, BACKEND, CHANGED, GRADIENTS, REUSED, SLOTS

WIDE = jax.ShapeDtypeStruct((64, 32), jnp.float32)


def predicted(captured: Captured, assembled: Assembled, point: Point) -> MemoryPrediction:
    return predict_memory(parallelize(captured.graph, assembled.assignment(point)), captured.differentiated, Training())


@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**32 - 1))
def test_the_search_counts_at_least_the_memory_of_the_graph(name: str, seed: int) -> None:
    """It counts more if several readers change a value: then the original is dead, and equal changes are one."""
    captured, assembled = named(name)
    point = random_point(assembled, np.random.default_rng(seed))
    assert counted(assembled, point, "memory") >= predicted(captured, assembled, point).additive * (1 - 1e-9)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("weight", [0.0, math.inf])
def test_the_search_counts_exactly_the_memory_of_optimal_strategies(name: str, weight: float) -> None:
    captured, assembled = named(name)
    (point,) = Minimizer(assembled.problem).at([weight])
    found = predicted(captured, assembled, point)
    assert point.memory == pytest.approx(counted(assembled, point, "memory")) == pytest.approx(found.additive)
    assert found.total >= found.step
    assert found.by_reason[ARGUMENTS] > 0
    assert found.by_reason[SLOTS] > 0


def kept(fn: Any, *args: Any, stacked: bool = False) -> tuple[Node, Residuals]:
    """What is kept of a function that is one operator."""
    graph = capture(fn, *args, argnums=tuple(range(len(args)))).graph
    flow = gradients(graph, range(len(args)))
    (node,) = [n for n in graph.nodes if n.kind != "input" and any(flow(Value(n, k)) for k in range(len(n.tensors)))]
    assert node.body is not None
    return node, residuals(node.body, tuple(flow(v) for v in node.operands), stacked)


def sizes(found: Residuals) -> list[int]:
    return sorted(nbytes for _, nbytes in found.inner)


FULL = 64 * 32 * 4


@pytest.mark.parametrize(
    ("fn", "operands", "results", "inner"),
    [
        (lambda x: -x, (False,), (False,), []),
        (jnp.tanh, (False,), (True,), []),
        (jnp.sin, (True,), (False,), []),
        (jax.nn.relu, (True,), (False,), []),  # the mask follows from it
        (lambda x: x.reshape(32, 64).T, (False,), (False,), []),
        (lambda x: jnp.sum(x * 3), (False,), (False,), []),
        (lambda x: jnp.where(x > 0, x, 0.0), (False,), (False,), [64 * 32]),  # a mask is smaller than what it follows from
        # tanh is kept, the factor 1 + tanh follows from it
        (lambda x: jax.nn.gelu(x, approximate=True), (True,), (False,), [FULL]),
        (lambda x: jax.nn.softmax(x, -1), (False,), (False,), [64 * 4, FULL]),
    ],
)
def test_residuals_of_an_operator(fn: Any, operands: Any, results: Any, inner: list[int]) -> None:
    _, found = kept(fn, WIDE)
    assert (found.operands, found.results, sizes(found)) == (operands, results, inner)


def test_inner_values_are_recomputed_from_operands_that_are_residuals() -> None:
    def again(fn: Any) -> bool:
        node, found = kept(fn, WIDE)
        assert node.body is not None
        return recomputable(node.body, found)

    assert again(lambda x: jax.nn.gelu(x, approximate=True))
    assert not again(lambda x: jax.nn.softmax(x, -1))  # its operand would have to be kept for it
    assert not again(jnp.sin)  # keeps nothing inside


def test_the_leanest_is_as_lean_as_the_frontier() -> None:
    captured, _ = made(MODELS["gpt"]())
    search = Search(captured.graph, captured.differentiated, MACHINE, Training())
    assert search.leanest.memory <= search.frontier[0][-1].memory


def test_the_residual_of_a_product_is_the_other_factor() -> None:
    assert kept(jnp.matmul, WIDE, jax.ShapeDtypeStruct((32, 8), jnp.float32))[1].operands == (True, True)
    graph = capture(jnp.matmul, WIDE, jax.ShapeDtypeStruct((32, 8), jnp.float32), argnums=0).graph
    (node,) = [n for n in graph.nodes if n.kind != "input"]
    assert node.body is not None
    assert residuals(node.body, (True, False)).operands == (False, True)
    assert residuals(node.body, (False, False)) == Residuals((False, False), (False,))


def norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize(
    "fn",
    [jnp.tanh, jnp.square, jnp.sin, jnp.log, jnp.exp, lambda x: x**3, lambda x: jax.nn.gelu(x, approximate=True), norm],
    ids=["tanh", "square", "sin", "log", "exp", "cube", "gelu", "norm"],
)
def test_a_step_of_a_scan_keeps_what_jax_stacks(fn: Any) -> None:
    """Including values that follow from others: nothing is recomputed there."""
    _, found = kept(fn, WIDE, stacked=True)
    stacked = jax.make_jaxpr(lambda xs: jax.vjp(lambda xs: lax.scan(lambda _, x: (None, fn(x)), None, xs)[1], xs)[1])(
        jax.ShapeDtypeStruct((7, *WIDE.shape), jnp.float32)
    )
    left = {id(v) for v in stacked.jaxpr.outvars if v.aval.shape == (7, *WIDE.shape)}
    assert len(left) == sum(found.operands) + sum(found.results) + sizes(found).count(FULL)


def residual_network(remat: bool, samples: int = 2048) -> Small:
    def block(p: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ p["a"]) @ p["b"]

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = (jax.checkpoint(block) if remat else block)(p, x)
        return jnp.mean(x**2)

    layer = {"a": jax.ShapeDtypeStruct((64, 512), jnp.float32), "b": jax.ShapeDtypeStruct((512, 64), jnp.float32)}
    return Small(loss, [layer] * 6, jax.ShapeDtypeStruct((samples, 64), jnp.float32))


def test_one_of_several_remats_is_open_at_a_time() -> None:
    """Of samples enough that the fastest plan divides them."""
    samples, found = 1 << 16, []
    for remat in (False, True):
        captured, assembled = made(residual_network(remat, samples))
        found.append(predicted(captured, assembled, Minimizer(assembled.problem).at([0.0])[0]))
    hidden = samples * 512 * 4
    assert found[0].additive - found[1].additive >= 4 * hidden / 8


def test_the_leanest_plan_partitions_recomputed_values_in_a_remat() -> None:
    """It would be free to leave it whole if nothing were counted there."""
    captured, assembled = made(residual_network(True))
    (leanest,) = Minimizer(assembled.problem).at([math.inf])
    graph = parallelize(captured.graph, assembled.assignment(leanest))
    hidden = [n for n, _ in graph.walk() if n.kind == "tanh"]
    assert len(hidden) == 6
    assert {slice_count(n.types[0], graph.axes) for n in hidden} == {8}


def test_under_a_limit_working_sets_fit_too() -> None:
    model = residual_network(False)
    captured, _ = made(model)
    search = Search(captured.graph, captured.differentiated, MACHINE, Training())
    fastest, leanest = search.fastest.memory, search.leanest.memory
    for share in (0.3, 0.6, 0.9):
        limit = leanest + share * (fastest - leanest)
        found = search.under(limit)
        assert found is not None
        assert found.memory <= limit
    assert search.under(leanest * 0.5) is None


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize("remat", [True, *by_hand(False)])
def test_the_compiled_program_has_the_predicted_arguments_and_gradients(remat: bool) -> None:
    """To the byte. How well the rest is predicted, `benchmarks/memory.py` measures."""
    model = residual_network(remat)
    plan = optimize(model.loss, model.params, model.batch, machine=Machine.grid(1, 8, "a100"), progress=False)
    for one in (plan.frontier[0], plan.frontier[-1]):
        arguments, outputs, *_ = one.check().memory_lines
        assert arguments.predicted == arguments.compiled
        assert outputs.predicted == outputs.compiled


def test_a_stopped_gradient_takes_no_memory() -> None:
    def loss(stop: Any) -> Any:  # of small weights beside frozen ones, which the backward pass reads
        def fn(params: Any, frozen: Any, x: Any) -> Any:
            for (a, b), w in zip(params, stop(frozen), strict=True):
                x = jnp.tanh(x @ w + x @ a @ b)
            return (x**2).mean()

        return fn

    def given(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    args = [(given(512, 8), given(8, 512))] * 2, [given(512, 512)] * 2, given(64, 512)
    stopped, plain = (
        optimize(loss(s), *args, machine=MACHINE, search="captured", progress=False) for s in (lax.stop_gradient, list)
    )
    assert (stopped.time, stopped.memory) == pytest.approx((plain.time, plain.memory))
    totals = [predict_memory(plan.program.pcg, frozenset(range(4)), Training()).total for plan in (stopped, plain)]
    assert totals[0] == pytest.approx(totals[1])


@pytest.mark.parametrize("name", ["copy", "name"])
def test_the_copy_of_a_literal_aliases_no_operand(name: str) -> None:
    """Equinox's bounded loop starts at such a copy. It has no operand that it could be in the place of."""
    same = jax.jit({"copy": jnp.copy, "name": lambda a: checkpoint_name(a, "start")}[name])

    def loss(w: Any, x: Any) -> tuple[Any, Any]:
        def step(c: Any, _: Any) -> Any:
            return (c[0] + 1, jnp.tanh(c[1] @ w) * c[0]), None

        start = same(2.0)
        return jnp.mean(lax.scan(step, (start, x), None, 3)[0][1]), start

    args = jnp.full((16, 16), 0.1), jnp.linspace(0, 1, 32 * 16).reshape(32, 16)
    plan = optimize(loss, *args, machine=MACHINE, search="captured", progress=False)
    found, expected = (jax.jit(jax.value_and_grad(fn, has_aux=True))(*args) for fn in (plan, loss))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found, expected)


def test_values_that_reuse_a_later_gradient_are_not_counted() -> None:
    """Activations of the last layers are dead before the gradients of the first layers are computed."""

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = jnp.tanh(x @ p)
        return jnp.mean(x**2)

    model = Small(loss, [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 4, jax.ShapeDtypeStruct((64, 512), jnp.float32))
    captured, assembled = made(model)
    (fastest,) = Minimizer(assembled.problem).at([0.0])
    found = predicted(captured, assembled, fastest)
    assert 0 < -found.by_reason[REUSED] < found.by_reason[GRADIENTS]
    assert found.total == pytest.approx(sum(h.nbytes for h in found.held))


def pooled() -> Small:
    def loss(params: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(x, params["k"].astype(jnp.bfloat16), (1, 1), "SAME")
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return Small(loss, {"k": jax.ShapeDtypeStruct((16, 8, 3, 3), jnp.float32)}, jax.ShapeDtypeStruct((8, 8, 16, 16), jnp.bfloat16))


def test_the_backend_needs_additional_memory() -> None:
    model = pooled()
    captured, assembled = made(model)
    (fastest,) = Minimizer(assembled.problem).at([0.0])
    graph = parallelize(captured.graph, assembled.assignment(fastest))
    on = {b: predict_memory(graph, captured.differentiated, Training(), b) for b in (GPU, CPU)}
    # the transposed image, and the zeros that the gradient of the maximum is scattered into, as in AlexNet compiled for H200s
    read = [n.operands[0] for n in graph.nodes if n.kind in ("conv_general_dilated", "reduce_window_max")]
    assert on[GPU].by_reason[BACKEND] == sum(v.tensor.nbytes / slice_count(v.type, graph.axes) for v in read)
    assert on[CPU].by_reason[BACKEND] > 0
    assert on[CPU].total > on[GPU].total
    host = replace(MACHINE, device=replace(MACHINE.device, name="cpu"), host=None)
    assert (backend_of(MACHINE), backend_of(host)) == (GPU, CPU)


def test_the_leanest_plan_has_small_working_sets() -> None:
    """Sums alone would gather a table for its look-ups, as it is no residual; but it is live for a moment."""

    def loss(table: Any, ids: Any) -> Any:
        return jnp.mean(jnp.tanh(table[ids]) ** 2)

    table = jax.ShapeDtypeStruct((2**16, 64), jnp.float32)
    captured = capture(loss, table, jax.ShapeDtypeStruct((64,), jnp.int32), argnums=0)
    search = Search(captured.graph, captured.differentiated, MACHINE, Training())
    whole = 2**16 * 64 * 4
    assert search.leanest.memory < 5 * whole / 8
    found = search.under(search.leanest.memory)
    assert found is not None
    assert found.memory <= search.leanest.memory


def convolutions() -> Small:
    def loss(kernels: Any, x: Any) -> Any:
        for kernel in kernels:
            x = jnp.tanh(lax.conv_general_dilated(x, kernel, (1, 1), "SAME"))
        return jnp.mean(x**2)

    kernels = [jax.ShapeDtypeStruct((4, 4, 3, 3), jnp.float32)] * 3
    return Small(loss, kernels, jax.ShapeDtypeStruct((2, 4, 16, 16), jnp.float32))


def test_an_operand_with_a_halo_is_a_residual_with_it() -> None:
    """Windows of three reach one row beyond, on both sides of each dimension that is split."""
    captured, assembled = made(convolutions())
    found = 0
    for seed in range(40):
        point = random_point(assembled, np.random.default_rng(seed))
        graph = parallelize(captured.graph, assembled.assignment(point))
        held = operator_memory(graph, captured.differentiated, Training())
        additive = predict_memory(graph, captured.differentiated, Training()).additive
        assert counted(assembled, point, "memory") >= additive * (1 - 1e-9)
        for keeper in held:
            for h in keeper.kept:
                if h.node.kind == "conv_general_dilated" and h.why == CHANGED:
                    (image, _), shape = h.node.operands, (2, 4, 16, 16)
                    piece = local_shape(shape, image.type, graph.axes)
                    extended = [n + 2 if k > 1 and n < 16 else n for k, n in enumerate(piece)]
                    runs_again = any(map(gathered_again, h.node.operands))  # then what has arrived is kept, and not the copy
                    assert h.nbytes == 4 * (math.prod(extended) - (math.prod(piece) if runs_again else 0))
                    found += 1
    assert found > 10


def gathered_again(v: Value) -> bool:
    """Whether some of the changes that lead to a value are made again when it is needed."""
    while v.node.kind in PARALLELIZATION and not v.node.again:
        v = v.node.operands[0]
    return v.node.kind in PARALLELIZATION


def test_a_grouped_product_is_planned_with_its_users() -> None:
    def turned(y, x):
        return lax.ragged_dot(x, y, jnp.array([6, 0], "int32")).T

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 4, 4), (6, 4))]
    assert optimize(turned, *shapes, machine=Machine.grid(1, 2), progress=False).memory > 0
