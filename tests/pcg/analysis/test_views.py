"""Views cost nothing and slices cost what they read: layers cost the same if stacked, sliced, scanned or separate."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer, one_in
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import random_point

import unity
from unity.machine.machine import Machine
from unity.pcg.analysis.views import costs_nothing, is_view, of_argument
from unity.pcg.capture.capture import capture
from unity.pcg.ir.program import Body, close
from unity.pcg.propagation.specifications import spec_of
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.assembly import assemble
from unity.search.cost.cost import Training
from unity.search.cost.roofline import accesses
from unity.search.session import Candidate, Search

EIGHT = Machine.grid(4, 2, "v100")
MACHINES = (Machine.grid(1, 8, "a100"), Machine.preset("dgx-h100-4x8"))


def f(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def body_of(fn: Callable[..., Any], *args: Any) -> Body:
    return close(jax.make_jaxpr(fn)(*args))


def touched(body: Body) -> float:
    """Return the fraction of the first operand that a program reads."""
    access = accesses(body)[0]
    return min(access.traversed + access.selected, 1.0)


SHAPES = st.lists(st.sampled_from((1, 1, 2, 3, 4)), min_size=1, max_size=4).map(tuple)


@st.composite
def moves(draw: st.DrawFn) -> tuple[tuple[int, ...], Callable[[Any], Any]]:
    """A shape, and an operator that moves elements about or takes some."""
    shape = draw(SHAPES)
    ends = [tuple(sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))) for n in shape]
    kind = draw(st.sampled_from(("slice", "dynamic_slice", "transpose", "reshape", "broadcast", "unstack", "split")))
    if kind == "slice":
        return shape, lambda x: jax.lax.slice(x, [a for a, _ in ends], [b for _, b in ends])
    if kind == "dynamic_slice":
        return shape, lambda x: jax.lax.dynamic_slice(x, [a for a, _ in ends], [b - a for a, b in ends])
    if kind == "transpose":
        order = draw(st.permutations(range(len(shape))))
        return shape, lambda x: jax.lax.transpose(x, order)
    if kind == "reshape":
        other = draw(st.permutations(shape))
        return shape, lambda x: jax.lax.reshape(x, other)
    axis = draw(st.integers(0, len(shape) - 1))
    if kind == "unstack":
        return shape, lambda x: jnp.unstack(x, axis=axis)
    if kind == "split":
        return shape, lambda x: jax.lax.split(x, (1,) * shape[axis], axis)
    new = draw(SHAPES)
    return shape, lambda x: jax.lax.broadcast_in_dim(x, (*new, *shape), range(len(new), len(new) + len(shape)))


@given(moves())
@settings(max_examples=fewer(100), deadline=None)
def test_a_view_is_a_block_of_its_operand_and_a_slice_reads_its_result(case: Any) -> None:
    """The elements are numbered, moved by JAX, and looked at where they are then."""
    shape, move = case
    body = body_of(move, f(*shape))
    if not body.equations:  # JAX makes nothing of it
        return
    (equation,) = body.equations
    spec = spec_of(body, equation)
    assert spec is not None
    results = jax.tree.leaves(move(jnp.arange(prod(shape)).reshape(shape)))
    taken = [np.asarray(x).ravel() for x in results]
    assert spec.view == all((some == some[0] + np.arange(some.size)).all() for some in taken)
    if equation.name in ("slice", "dynamic_slice"):
        assert spec.reads == pytest.approx(len(set(taken[0].tolist())) / prod(shape))
        assert touched(body) == pytest.approx(spec.reads)


def test_a_reader_of_a_whole_operand_beside_a_slice_touches_all_of_it() -> None:
    x = f(8, 4, 4)
    assert touched(body_of(lambda x: x[0] @ x[1], x)) == pytest.approx(0.25)
    assert touched(body_of(lambda x: x[0] + x.sum(0), x)) == 1
    assert touched(body_of(lambda x, i: jax.lax.dynamic_index_in_dim(x, i), x, f(dtype="int32"))) == pytest.approx(1 / 8)
    assert touched(body_of(lambda x: (x, x[0]), x)) == 1


def test_index_arithmetic_costs_nothing_and_single_numbers_of_a_gradient_do() -> None:
    i, x = f(dtype="int32"), f(8, 4)
    assert costs_nothing(body_of(lambda i: jnp.where(i < 0, i + 8, i), i))
    assert costs_nothing(body_of(lambda x, i: x[jnp.where(i < 0, i + 8, i)], x, i))
    assert not is_view(body_of(lambda x, i: x[jnp.where(i < 0, i + 8, i)], x, i))
    assert not costs_nothing(body_of(lambda a: a * 2.0, f()))
    assert not costs_nothing(body_of(lambda i: i + 1, f(8, dtype="int32")))


def layer(x: Any, w: Any) -> Any:
    return x + jnp.tanh(x @ w)


def loss(x: Any) -> Any:
    return (x**2).mean()


def apart(ws: Any, x: Any) -> Any:
    for w in ws:
        x = layer(x, w)
    return loss(x)


def written_out(w: Any, x: Any) -> Any:
    for i in range(len(w)):
        x = layer(x, w[i])
    return loss(x)


def unstacked(w: Any, x: Any) -> Any:
    return apart(list(w), x)


def by_scan(w: Any, x: Any) -> Any:
    return loss(jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0])


def by_index(w: Any, x: Any) -> Any:
    return loss(jax.lax.fori_loop(0, len(w), lambda i, x: layer(x, w[i]), x))


def by_slice(w: Any, x: Any) -> Any:
    return loss(jax.lax.fori_loop(0, len(w), lambda i, x: layer(x, jax.lax.dynamic_index_in_dim(w, i, keepdims=False)), x))


LAYERS = {"written out": written_out, "unstacked": unstacked, "scan": by_scan, "index": by_index, "slice": by_slice}


def fastest(fn: Callable[..., Any], *args: Any, machine: Machine) -> float:
    captured = capture(fn, *args)
    return Search(captured.graph, captured.differentiated, machine, Training()).fastest.time


@pytest.mark.parametrize("machine", MACHINES, ids=("8", "32"))
@pytest.mark.parametrize("width", [1024, 4096])
def test_layers_cost_the_same_however_their_weights_are_stacked(width: int, machine: Machine) -> None:
    """Where launches cost nothing: a scan has one for every row that it stacks. Nor do messages between nodes: where weights are
    apart, or each slice of them is read for itself, gradients of 67 MB are added up in eight collectives, too large to be merged.

    A scan keeps carries, and the last layer's sum of squares joins no layer: 4 to 7 %.
    """
    machine = replace(machine, device=replace(machine.device, launch=0.0))
    if machine.levels[0].size > 1:
        machine = replace(machine, levels=tuple(replace(level, protocols=(), latency=1e-12) for level in machine.levels))
    stacked, x = f(8, width, width), f(8192, width)
    times = {name: fastest(fn, stacked, x, machine=machine) for name, fn in LAYERS.items()}
    times["apart"] = fastest(apart, [f(width, width)] * 8, x, machine=machine)
    assert max(times.values()) <= 1.07 * min(times.values()), times


@pytest.mark.parametrize("form", one_in(2, LAYERS))
def test_sliced_layers_compute_the_function_and_send_the_predicted_bytes(form: str) -> None:
    """Values and gradients in float64, and the collectives: of the fastest plan, and of some drawn at random."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        args = jnp.asarray(rng.normal(size=(4, 16, 16))), jnp.asarray(rng.normal(size=(64, 16)))
        wanted = jax.value_and_grad(LAYERS[form])(*args)
        captured = capture(LAYERS[form], *args)
        assembled = assemble(captured.graph, captured.differentiated, EIGHT, Training())
        searched = Search(captured.graph, captured.differentiated, EIGHT, Training())
        drawn = (assembled.assignment(random_point(assembled, np.random.default_rng(seed))) for seed in range(2))
        for candidate in (searched.fastest, *(Candidate(0.0, 0.0, a) for a in drawn)):
            plan = Plan(PlanFamily(LAYERS[form], captured, searched, 0.0), candidate)
            value = jax.value_and_grad(plan)(*args)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), value, wanted)
            assert plan.check().agrees()


def test_gradients_of_slices_of_an_argument_are_reduced_together() -> None:
    """As those of arguments are: what they are put into waits for nothing else."""
    captured = capture(written_out, f(8, 256, 256), f(8192, 256))
    slices = [n for n in captured.graph.nodes if n.kind == "slice"]
    assert len(slices) == 8
    assert all(map(of_argument, slices))
    assert not any(of_argument(n) for n in captured.graph.nodes if n.kind == "dot_general")


HEADS, SIZE, MODEL = 16, 64, 1024


def by_einsum(w: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w[n].reshape(MODEL, HEADS, SIZE)) for n in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k) / 8)
    mixed = jnp.einsum("bhst,bthe->bshe", scores, v)
    return loss(jnp.einsum("bshe,hed->bsd", mixed, w["o"].reshape(HEADS, SIZE, MODEL)))


def by_jax(w: Any, x: Any) -> Any:
    q, k, v = ((x @ w[n]).reshape(*x.shape[:2], HEADS, SIZE) for n in "qkv")
    return loss(jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ w["o"])


def by_vmap(w: Any, x: Any) -> Any:
    def head(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.softmax(q @ k.T / 8) @ v

    def sample(x: Any) -> Any:
        q, k, v = ((x @ w[n]).reshape(-1, HEADS, SIZE) for n in "qkv")
        return jax.vmap(head, 1, 1)(q, k, v).reshape(x.shape) @ w["o"]

    return loss(jax.vmap(sample)(x))


def by_transpose(w: Any, x: Any) -> Any:
    q, k, v = ((x @ w[n]).reshape(*x.shape[:2], HEADS, SIZE).transpose(0, 2, 1, 3) for n in "qkv")
    mixed = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) / 8) @ v
    return loss(mixed.transpose(0, 2, 1, 3).reshape(x.shape) @ w["o"])


@pytest.mark.parametrize("machine", MACHINES, ids=("8", "32"))
def test_attention_costs_the_same_however_it_is_written(machine: Machine) -> None:
    """But for what is transposed by hand, which products of other dimensions read as it is: three copies, there and back."""
    args = {n: f(MODEL, MODEL) for n in "qkvo"}, f(8, 1024, MODEL)
    times = [fastest(fn, *args, machine=machine) for fn in (by_einsum, by_jax, by_vmap)]
    assert max(times) <= 1.05 * min(times), times
    copies = 2 * 3 * args[1].size * 4 / machine.devices / machine.device.bandwidth * 3 + 3 * 2 * machine.device.launch
    assert fastest(by_transpose, *args, machine=machine) <= 1.01 * (min(times) + copies)


def test_keys_of_random_numbers_are_no_indices() -> None:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(w * jax.random.bernoulli(jax.random.key(3), 0.5, w.shape))

    w = jnp.ones((2, 4, 6))
    plan = unity.optimize(loss, w, machine=unity.Machine.grid(1, 4), budget=0, progress=False)
    assert float(plan(w)) == float(loss(w))


def test_only_slices_without_strides_are_views() -> None:
    x = jnp.ones(16)
    strided, plain = (close(jax.make_jaxpr(lambda x, s=s: jax.lax.slice(x, (0,), (8,), s))(x)) for s in ((2,), None))
    assert is_view(plain)
    assert not is_view(strided)
