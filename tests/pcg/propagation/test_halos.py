"""Halos of spatial dimensions over devices: neighbours send exactly what is needed, and plans send what they predict."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding
from small_models import Small, arrays, counted, cross_entropy, f, i, made, random_point

import unity
from unity.exec.compiled.check import predicted_elements
from unity.exec.compiled.hlo import collectives
from unity.exec.lowering import mesh_of, program
from unity.exec.lowering import spec_of as spec_of_type
from unity.exec.planned_step import compiler_options
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured, capture
from unity.pcg.ir.gradient_flow import losses
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.ir.program import Body, close
from unity.pcg.parallel.check import check
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.parallel.traffic import traffic
from unity.pcg.propagation.choices import choices
from unity.pcg.propagation.halos import messages, undivided_windows
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import Halo
from unity.pcg.types.parallel_type import partitioned
from unity.search.cost.assembly import Assembled, assemble
from unity.search.cost.cost import Training
from unity.search.cost.prediction import predict
from unity.search.solver.minimizer import Minimizer
from unity.verify.proofs.operators import GradientProof, OperatorProof, fits

# What neighbours send


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 5), st.integers(1, 5))
def test_messages_deliver_the_halo(before: int, after: int, piece: int, devices: int) -> None:
    whole = list(range(piece * devices))
    for device in range(devices):
        start, end = device * piece, (device + 1) * piece
        arrived = []
        for m in messages(Halo(before, after), piece, devices):
            sender = device - m.ahead
            if 0 <= sender < devices:
                slice_ = whole[sender * piece : (sender + 1) * piece]
                arrived += slice_[-m.indices :] if m.ahead > 0 else slice_[: m.indices]
        assert sorted(arrived) == whole[max(0, start - before) : start] + whole[end : end + after]


def test_no_message_is_empty() -> None:
    assert messages(Halo(0, 0), 4, 8) == ()
    assert messages(Halo(1, 1), 4, 1) == ()


# Which windows have a factor, and that it is right


@st.composite
def windows(draw: Any) -> tuple[Body, dict[str, Any]]:
    """Draw a one-dimensional convolution or pooling, and its parameters."""
    size, stride = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    n = stride * draw(st.sampled_from([2, 3, 4, 6])) + draw(st.sampled_from([0, 0, 0, 1]))
    kind = draw(st.sampled_from(["conv", "max", "sum"]))
    dilation = 1 if kind == "max" else draw(st.integers(1, 3))  # JAX has no derivative of a dilated maximum
    span = (size - 1) * dilation + 1
    low = draw(st.integers(-1 if kind == "conv" else 0, span))
    high = max(0, span - stride - low) + draw(st.sampled_from([0, 0, 0, 1, 2]))
    assume(n + low + high >= span)
    figures = {"n": n, "stride": stride, "span": span, "low": low, "m": (n + low + high - span) // stride + 1}

    def convolve(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(x, k, (stride,), [(low, high)], rhs_dilation=(dilation,))

    def pool(x: Any) -> Any:
        start, combine = (-jnp.inf, lax.max) if kind == "max" else (0.0, lax.add)
        padding = [(0, 0), (0, 0), (low, high)]
        return lax.reduce_window(x, start, combine, (1, 1, size), (1, 1, stride), padding, window_dilation=(1, 1, dilation))

    x, k = jax.ShapeDtypeStruct((1, 1, n), "float32"), jax.ShapeDtypeStruct((1, 1, size), "float32")
    return close(jax.make_jaxpr(convolve)(x, k) if kind == "conv" else jax.make_jaxpr(pool)(x)), figures


def belong_together(n: int, stride: int, span: int, low: int, m: int) -> bool:
    """Return whether the windows of each of several devices begin at the same offset from its slice, and none is outside."""
    return m > 1 and n == m * stride and 0 <= low < span


@given(windows(), st.sampled_from([2, 3]))
def test_every_choice_of_every_window_is_proved(made: tuple[Body, dict[str, Any]], devices: int) -> None:
    body, figures = made
    along = [c for c in choices(body) if c.operands[0] == partitioned(2)]
    assert len(along) == belong_together(**figures)
    spec = spec_of(body, body.equations[0])
    assert spec is not None
    assert bool(spec.blocked) == (not along)
    for c in along:
        if fits(body, (c,), (devices,)):
            assert [p.check((c,), (devices,)).answer for p in (OperatorProof(body), GradientProof(body))] == ["proved", "proved"]


def test_slices_at_inner_digits_have_no_halo() -> None:
    """The slice of a device at an inner digit is not contiguous."""
    spread = lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME")  # noqa: E731
    apart = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2), (1, 1, 2), "VALID")  # noqa: E731
    x, k = jnp.ones((2, 2, 12)), jnp.ones((2, 2, 3))
    seeds = ((0, partitioned(2, 2)),)
    for body, found in ((close(jax.make_jaxpr(spread)(x, k)), False), (close(jax.make_jaxpr(apart)(x)), True)):
        assert (partitioned(2, 2) in {c.operands[0] for c in choices(body, seeds)}) == found


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda x, k: lax.conv_general_dilated(x, k, (1, 1), [(1, 2), (1, 2)], lhs_dilation=(2, 2)), "transposed"),
        (lambda x, k: lax.conv_general_dilated(x, k, (2, 2), "VALID"), "do not go evenly"),
        (lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", batch_group_count=2), "batch is in groups"),
    ],
)
def test_blocked_dimensions_have_a_reason(fn: Any, why: str) -> None:
    body = close(jax.make_jaxpr(fn)(jnp.ones((2, 2, 8, 8)), jnp.ones((2, 2, 3, 3))))
    spec = spec_of(body, body.equations[0])
    assert spec is not None
    assert {dim for dim, _ in spec.blocked} >= {2, 3}
    assert all(why in text for _, text in spec.blocked)
    assert not {c.operands[0].dim for c in choices(body)} & {2, 3}


def test_undivided_windows_of_a_graph_are_listed() -> None:
    def loss(k: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(x, k, (2, 1), "VALID", dimension_numbers=NUMBERS)
        return lax.conv_general_dilated(y, k, (1, 1), "SAME", dimension_numbers=NUMBERS).sum()

    captured = capture(loss, f(3, 3, 4, 4), f(2, 8, 9, 4))
    found = {(dim, why.partition(" windows")[0]) for node, dim, why in undivided_windows(captured.graph)}
    assert found == {(1, "3"), (2, "7")}


# Whole plans

NUMBERS = ("NHWC", "HWIO", "NHWC")


def network(b: int = 2, n: int = 16) -> Small:
    """Return a network of convolutions and poolings of all usual kinds, for a few large images."""

    def conv(x: Any, k: Any, stride: int = 1, padding: str = "SAME") -> Any:
        return lax.conv_general_dilated(x, k, (stride, stride), padding, dimension_numbers=NUMBERS)

    def pool(x: Any, kind: str, size: int, stride: int, padding: str) -> Any:
        start, combine = (-jnp.inf, lax.max) if kind == "max" else (0.0, lax.add)
        return lax.reduce_window(x, start, combine, (1, size, size, 1), (1, stride, stride, 1), padding)

    def loss(p: Any, batch: Any) -> Any:
        x = conv(batch["image"], p["k1"])
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        x = jax.nn.relu((x - mean) * lax.rsqrt(variance + 1e-3) * p["g1"] + p["b1"])
        x = pool(x, "max", 2, 2, "VALID")
        x = jnp.concatenate([conv(x, p["k2"]), conv(x, p["k3"], 1, "VALID"), pool(x, "sum", 3, 1, "SAME") / 9], -1)
        x = conv(jax.nn.relu(x), p["k4"], 2)
        x = pool(jnp.tanh(x), "max", 3, 1, "SAME")
        return cross_entropy(x.mean((1, 2)) @ p["w"], batch["y"])

    params = {
        "k1": f(3, 3, 4, 4), "b1": f(4), "g1": f(4), "k2": f(5, 5, 4, 4), "k3": f(1, 1, 4, 4), "k4": f(3, 3, 12, 4), "w": f(4, 8),
    }  # fmt: skip
    return Small(loss, params, {"image": f(b, n, n, 4), "y": i(b)})


MACHINES = {"8": Machine.grid(1, 8, "a100"), "2x4": Machine.grid(2, 4, "a100"), "6": Machine.grid(1, 6, "v100")}


def spatial(machine: Machine, model: Small) -> tuple[Captured, Assembled]:
    """Return the problem of the strategies in which every operator that can has a halo: all other choices have infinite cost."""
    captured = capture(model.loss, model.params, model.batch)
    assembled = assemble(captured.graph, captured.differentiated, machine, Training())
    costs = []
    for d, cost in zip(assembled.domains, assembled.costs, strict=True):
        with_halo = np.array([any(d.choices[c].halos for c in value) for value in d.picks])
        costs.append(replace(cost, forward=np.where(with_halo, cost.forward, np.inf)) if with_halo.any() else cost)
    return captured, replace(assembled, costs=tuple(costs))


def with_halos(graph: PCG) -> list[Node]:
    """Return the operators for which neighbours exchange halos."""
    return [c.node for c in traffic(graph) if c.kind == "collective-permute"]


def gradient_step(graph: PCG, machine: Machine, captured: Captured, leaves: list) -> tuple[dict[str, int], Any]:
    """Return the elements of every kind of collective in a compiled step of a parallel graph, and its loss and gradients."""
    mesh, weights = mesh_of(machine.axes, jax.devices()), sorted(captured.differentiated)
    run, (end,) = program(graph, mesh), losses(graph)

    def step(chosen: list, others: list) -> Any:
        given, rest = iter(chosen), iter(others)
        return run(*(next(given) if k in weights else next(rest) for k in range(len(leaves))))[end]

    specs = [NamedSharding(mesh, spec_of_type(n.types[0], machine.axes, n.tensors[0].ndim)) for n in graph.inputs]
    placed = [jax.device_put(x, s) for x, s in zip(leaves, specs, strict=True)]
    chosen, others = [placed[k] for k in weights], [x for k, x in enumerate(placed) if k not in weights]
    compiled = jax.jit(jax.value_and_grad(step)).lower(chosen, others).compile(compiler_options=compiler_options())
    found: dict[str, int] = {}
    for c in collectives(compiled.as_text() or ""):
        found[c.kind] = found.get(c.kind, 0) + c.elements * c.count
    return found, compiled(chosen, others)


@pytest.mark.parametrize("name", MACHINES)
def test_spatial_strategies_compute_and_send_what_is_predicted(name: str) -> None:
    machine = MACHINES[name]
    with jax.enable_x64(True):
        model = network(n=24 if name == "6" else 16)
        captured, assembled = spatial(machine, model)
        params, batch = arrays(model.params), arrays(model.batch)
        point = random_point(assembled, np.random.default_rng(len(name)))
        graph = parallelize(captured.graph, assembled.assignment(point))
        check(graph)
        assert len({id(node) for node in with_halos(graph)}) >= 4
        found, (value, gradients) = gradient_step(graph, machine, captured, jax.tree.leaves((params, batch)))
        wanted, expected = jax.jit(jax.value_and_grad(model.loss))(params, batch)
        np.testing.assert_allclose(value, wanted, rtol=1e-10)
        for x, y in zip(gradients, jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10 * float(np.abs(y).max()))
        assert found == predicted_elements(graph, captured.differentiated)


def chain(b: int = 2, n: int = 16, c: int = 4) -> Small:
    """Return a chain of operators without branches."""

    def loss(p: Any, x: Any) -> Any:
        for k in p:
            x = jnp.tanh(lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=NUMBERS))
        return (x * x).mean()

    return Small(loss, [f(3, 5, c, c), f(5, 3, c, c)], f(b, n, n, c))


@cache
def spatial_chain() -> tuple[Captured, Assembled]:
    with jax.enable_x64(True):
        return spatial(MACHINES["2x4"], chain())


@given(st.integers(0, 2**32 - 1))
def test_the_search_prices_halos_as_the_prediction_does(seed: int) -> None:
    captured, assembled = spatial_chain()
    point = random_point(assembled, np.random.default_rng(seed))
    graph = parallelize(captured.graph, assembled.assignment(point))
    found = predict(graph, assembled.machine, captured.differentiated)
    assert with_halos(graph)
    assert counted(assembled, point, "time") == pytest.approx(found.time, rel=1e-9)


def test_one_large_image_is_split_in_space() -> None:
    """Without samples to split, halos are smaller than channels or partial sums of all pixels."""
    captured, assembled = made(chain(1, 512, 32), MACHINES["8"])
    (fastest,) = Minimizer(assembled.problem).at([0.0])
    graph = parallelize(captured.graph, assembled.assignment(fastest))
    assert len({id(node) for node in with_halos(graph)}) == 2


def test_an_optimized_plan_sends_what_it_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = chain(1, 256, 32)
    with jax.enable_x64(True):
        plan = unity.optimize(model.loss, model.params, model.batch, machine=MACHINES["8"], progress=False)
        assert with_halos(plan.program.pcg)
        for gradient in (False, True):
            found = plan.check(gradient=gradient)
            assert found.agrees(0.0), found
            assert "collective-permute" in {line.kind for line in found.lines}
