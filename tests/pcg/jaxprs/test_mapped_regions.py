"""A `shard_map` and the global program that replaces it have the same values and gradients, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand, fewer
from compiler_options import EXACT
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from mapped_programs import IDIOMS

import unity
from unity.base.errors import CaptureError
from unity.pcg.capture.capture import capture, unparallelized
from unity.pcg.jaxprs.jaxprs import equations, is_reference
from unity.pcg.jaxprs.references import without_references
from unity.pcg.jaxprs.shard_maps.regions import raised
from unity.pcg.jaxprs.shard_maps.stacked_collectives import COLLECTIVES

N = 24  # rows and columns of the operands: 12 devices divide them


def mesh_of(*sizes: int) -> Mesh:
    names = tuple("xyz"[: len(sizes)])
    return jax.make_mesh(sizes, names, devices=jax.devices()[: prod(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def global_function(fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return a function with one result without its regions."""
    program = raised(jax.make_jaxpr(fn)(*args))
    names = {e.primitive.name for eqn in program.eqns for e in (eqn, *equations(eqn))}
    assert names.isdisjoint({"shard_map", "ppermute", "all_gather", "axis_index", "pvary", "psum_invariant", "gathered", "piece"})
    run = core.jaxpr_as_fun(program)
    return lambda *args: run(*args)[0]


exactly_compiled = partial(jax.jit, compiler_options=EXACT)


def assert_equal_with_gradients(fn: Callable[..., Any], *args: Any, argnums: tuple[int, ...] | None = None) -> None:
    numbers = tuple(range(len(args))) if argnums is None else argnums
    other = global_function(fn, *args)
    expected, result = (exactly_compiled(jax.value_and_grad(lambda *a, f=f: _loss(f(*a)), numbers))(*args) for f in (fn, other))
    np.testing.assert_allclose(exactly_compiled(fn)(*args), exactly_compiled(other)(*args), rtol=1e-4, atol=1e-5)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(result), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4 * float(np.abs(x).max() + 1e-3))


def _loss(x: jax.Array) -> jax.Array:
    weights = jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
    return (weights * x + jnp.sin(x)).sum()


@jax.custom_vjp
def scaled(x: jax.Array) -> jax.Array:
    return x * 2


scaled.defvjp(lambda x: (x * 2, None), lambda _, g: (jnp.tanh(g),))  # not linear: it sees the cotangents of each device


@jax.custom_jvp
def bent(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


bent.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0] * jnp.cos(primals[0]) * 3))


@dataclass(frozen=True)
class Context:
    """The axis that an operation is over, all axes of the mesh, their sizes, and whether types are checked."""

    axis: str
    size: int
    axes: tuple[str, ...]
    devices: int
    checked: bool

    def varying(self, x: Any, *names: str) -> Any:
        """Cast a value to vary along some axes."""
        missing = tuple(n for n in names if self.checked and n not in jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x


def rotated(x: Any, c: Context) -> Any:
    return lax.ppermute(x, c.axis, [(i, (i + 1) % c.size) for i in range(c.size)])


def scattered(x: Any, names: Any, n: int) -> Any:
    return lax.psum_scatter(x, names, scatter_dimension=0, tiled=True) if len(x) % n == 0 else x * 0.5


def exchanged(x: Any, names: Any, n: int, dims: tuple[int, int]) -> Any:
    return lax.all_to_all(x, names, *dims, tiled=True) if x.shape[dims[0]] % n == 0 else x * 0.5


def joined(x: Any, names: Any, n: int) -> Any:
    return lax.all_gather(x, names, axis=1, tiled=True) if x.shape[1] * n <= 4 * N else x - 0.5


def looped(x: Any, c: Context) -> Any:
    def step(carry: Any, k: Any) -> Any:
        moved = jnp.tanh(rotated(carry, c)) + lax.axis_index(c.axis) * 0.1 + k
        return moved, lax.psum(moved.mean(), c.axis)

    x, totals = lax.scan(step, x, jnp.arange(2.0))
    return x + totals.sum()


def repeated(x: Any, c: Context) -> Any:
    """A loop whose number of steps differs between devices."""
    return lax.stop_gradient(lax.while_loop(lambda x: x.sum() < 3 + lax.axis_index(c.axis), lambda x: jnp.abs(x) + 0.5, x)) + x


OPERATIONS: dict[str, Callable[[Any, Context], Any]] = {
    "sum": lambda x, c: lax.psum(x, c.axis),
    "sum over all": lambda x, c: lax.psum(jnp.sin(x), c.axes),
    "mean": lambda x, c: x + lax.pmean(x.mean(0), c.axis),
    "largest": lambda x, c: x - lax.pmax(lax.stop_gradient(x.max()), c.axis),
    "gather": lambda x, c: joined(x, c.axis, c.size),
    "gather over all": lambda x, c: joined(x, c.axes, c.devices),
    "gather untiled": lambda x, c: lax.all_gather(x, c.axis, axis=1).mean(1),
    "scatter": lambda x, c: scattered(x, c.axis, c.size),
    "scatter over all": lambda x, c: scattered(x, c.axes, c.devices),
    "exchange": lambda x, c: exchanged(x, c.axis, c.size, (1, 0)),
    "exchange in place": lambda x, c: exchanged(x, c.axis, c.size, (0, 0)),
    "exchange over all": lambda x, c: exchanged(x, c.axes, c.devices, (0, 1)),
    "rotate": rotated,
    "shift": lambda x, c: x + lax.ppermute(x, c.axis, [(i, i + 1) for i in range(c.size - 1)]),
    "permute over all": lambda x, c: lax.ppermute(x, c.axes, [(i, (5 * i + 1) % c.devices) for i in range(c.devices - 1)]),
    "number": lambda x, c: x * (1 + lax.axis_index(c.axis)),
    "number over all": lambda x, c: x + jnp.cos(lax.axis_index(c.axes) * 1.0),
    "loop": looped,
    "loop of different lengths": repeated,
    "branch": lambda x, c: lax.cond(lax.axis_index(c.axis) == 0, jnp.sin, lambda x: x * 2, x),
    "rule": lambda x, c: scaled(x),
    "forward rule": lambda x, c: bent(x),
    "activation": lambda x, c: jax.nn.gelu(x) + jax.nn.relu(x),
    "checkpoint": lambda x, c: jax.checkpoint(lambda x: jnp.tanh(x) * lax.psum(x.mean(), c.axis))(x),
    "product": lambda x, c: jnp.tanh(x) @ jnp.ones((x.shape[1], x.shape[1])) / x.shape[1],
    "compiled": lambda x, c: jax.jit(lambda x: lax.psum(jnp.cos(x), c.axis))(x),
}


def run(operation: str, x: Any, c: Context) -> Any:
    names = c.axes if "over all" in operation else (c.axis,)
    return OPERATIONS[operation](c.varying(x, *names), c)


@st.composite
def programs(draw: st.DrawFn) -> Callable[..., Any]:
    """Draw a region with two operands."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (4, 2), (2, 1)]))
    names = "xyz"[: len(sizes)]
    mesh = mesh_of(*sizes)
    spec = st.permutations(names).flatmap(lambda order: st.sampled_from(_specs(order)))
    into = (draw(spec), draw(spec))
    steps = draw(st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.sampled_from(names)), min_size=1, max_size=5))
    varying: set[str] = set()

    def body(x: Any, w: Any, checked: bool = True) -> Any:
        for operation, name in steps:
            x = run(operation, x, Context(name, mesh.shape[name], tuple(names), prod(sizes), checked)) * w.mean()
        varying.clear()
        varying.update(jax.typeof(x).manual_axis_type.varying)
        return x

    every = P(tuple(names))
    x = jnp.zeros((N, N))
    jax.make_jaxpr(jax.shard_map(body, mesh=mesh, in_specs=into, out_specs=every))(x, x)
    needed = set(varying)
    out = draw(spec.filter(lambda spec: needed <= {n for d in spec if d for n in (d if isinstance(d, tuple) else (d,))}))
    checked = draw(st.booleans())
    return jax.shard_map(partial(body, checked=checked), mesh=mesh, in_specs=into, out_specs=out, check_vma=checked)


def _specs(order: Any) -> list[P]:
    """Return specifications of matrices over some axes in some order."""
    if len(order) == 1:
        return [P(), P(order[0]), P(None, order[0])]
    a, b = order
    return [P(), P(a), P(None, a), P(a, b), P((a, b)), P(None, (a, b))]


@settings(max_examples=fewer(12), phases=(Phase.explicit, Phase.reuse, Phase.generate))  # shrinking compiles for minutes
@given(programs(), st.integers(0, 99))
def test_a_region_equals_its_global_program(program: Callable[..., Any], seed: int) -> None:
    x, w = jax.random.normal(jax.random.key(seed), (2, N, N))
    assert_equal_with_gradients(program, x, w)


@pytest.mark.parametrize("checked", [True, *by_hand(False)])
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_each_operation_equals_its_global_program(operation: str, checked: bool) -> None:
    mesh = mesh_of(2, 3)
    x, w = jax.random.normal(jax.random.key(0), (2, N, N))

    def body(x: Any, w: Any) -> Any:
        return run(operation, x, Context("y", 3, ("x", "y"), 6, checked)) * w.mean()

    assert_equal_with_gradients(
        jax.shard_map(body, mesh=mesh, in_specs=(P("x", "y"), P("y")), out_specs=P(("x", "y")), check_vma=checked), x, w
    )


@pytest.mark.parametrize("name", IDIOMS)
def test_idioms_equal_their_global_programs(name: str) -> None:
    idiom = IDIOMS[name]()
    assert_equal_with_gradients(idiom.loss, *idiom.arguments(), argnums=tuple(range(idiom.weights)))


def test_rules_written_for_devices_see_what_they_would_see_there() -> None:
    """Megatron's pair of conjugate functions, of which JAX sums the cotangents of each device, unchecked."""

    @jax.custom_vjp
    def copied(x: Any) -> Any:
        return x

    @jax.custom_vjp
    def summed(x: Any) -> Any:
        return lax.psum(x, "x")

    copied.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "x"),))
    summed.defvjp(lambda x: (lax.psum(x, "x"), None), lambda _, g: (g,))
    mesh = mesh_of(4, 2)
    body = lambda a, b, x: summed(jnp.tanh(copied(x) @ a) @ b)  # noqa: E731
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(None, "x"), P("x"), P("y")), out_specs=P("y"), check_vma=False)
    keys = jax.random.split(jax.random.key(0), 3)
    a, b, x = (jax.random.normal(k, s) for k, s in zip(keys, [(8, 16), (16, 8), (4, 8)], strict=True))
    assert_equal_with_gradients(mapped, a, b, x)


@pytest.mark.parametrize("forward", [True, False])
def test_rules_are_told_apart_by_their_content(forward: bool) -> None:
    """Equal layers are one operator, in one capture and in another, and a rule that differs makes another one."""

    def layers(factor: float) -> Callable[..., Any]:
        call: Any
        if forward:
            call = jax.custom_jvp(lambda x: jnp.sin(x))
            call.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0] * factor))
        else:
            call = jax.custom_vjp(lambda x: jnp.sin(x))
            call.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (g * factor,))
        body = lambda x: lax.psum(call(call(x) * 2), "x")  # noqa: E731
        return jax.shard_map(body, mesh=mesh_of(2), in_specs=P("x"), out_specs=P())

    first, again, other = (capture(layers(factor), jnp.ones(8)) for factor in (1.0, 1.0, 2.0))
    calls = [[e for e in c.body.equations if e.name.startswith("custom_")] for c in (first, again, other)]
    assert [len(each) for each in calls] == [2, 2, 2]
    assert len({(e.signature, e.identity) for e in calls[0]}) == 1
    assert first.body.key == again.body.key != other.body.key


def test_rules_are_told_apart_by_their_precision() -> None:
    @jax.custom_vjp
    def call(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    def backward(_: None, g: jax.Array) -> tuple[jax.Array]:
        return (g * jnp.finfo(jnp.zeros((), float).dtype).bits,)

    call.defvjp(lambda x: (jnp.sin(x), None), backward)
    mapped = jax.shard_map(call, mesh=mesh_of(2), in_specs=P("x"), out_specs=P("x"))
    x = jnp.ones(4, jnp.float32)
    for wide in (False, True):
        with jax.enable_x64(wide):
            gradient = jax.grad(lambda x: global_function(mapped, x)(x).sum())(x)
        np.testing.assert_array_equal(gradient, np.full(4, 64 if wide else 32))


def test_rules_are_told_apart_by_the_axes_that_stay_automatic() -> None:
    @jax.custom_vjp
    def call(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    def backward(_: None, g: jax.Array) -> tuple[jax.Array]:
        return (g * len(jax.typeof(g).sharding.mesh.axis_names),)

    call.defvjp(lambda x: (jnp.sin(x), None), backward)
    x = jnp.ones(4)
    for sizes in ((2,), (2, 2)):
        mapped = jax.shard_map(call, mesh=mesh_of(*sizes), in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
        gradient = jax.grad(lambda x, mapped=mapped: global_function(mapped, x)(x).sum())(x)
        np.testing.assert_array_equal(gradient, np.full(4, len(sizes)))


def test_cotangents_of_results_that_differ_between_devices_are_divided() -> None:
    """Unchecked, the value is the first device's, and each device gets an equal share of the cotangent."""
    mesh = mesh_of(4)
    body = lambda x: x.sum() * (1.0 + lax.axis_index("x"))  # noqa: E731
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    x = jnp.arange(8.0)
    other = global_function(mapped, x)
    assert other(x) == 1.0  # 0 + 1
    np.testing.assert_array_equal(jax.grad(other)(x), jax.grad(mapped)(x))
    np.testing.assert_array_equal(jax.grad(other)(x), np.repeat([1, 2, 3, 4], 2) / 4)


def test_regions_in_regions_and_axes_that_stay_automatic() -> None:
    mesh = mesh_of(2, 4)

    def inner(x: Any) -> Any:
        return lax.psum(x * lax.axis_index(("x", "y")), ("x", "y")) + lax.pmean(x.sum(), "y")

    def outer(x: Any) -> Any:
        within = jax.shard_map(inner, in_specs=P("y"), out_specs=P(), axis_names={"y"})
        return jnp.tanh(within(x)) + x.sum()

    mapped = jax.shard_map(outer, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x"), axis_names={"x"})
    x = jax.random.normal(jax.random.key(1), (8, 8))
    body = jax.make_jaxpr(mapped)(x)
    inside = {e.primitive.name for eqn in body.eqns for e in equations(eqn)}
    assert "shard_map" in inside

    def by_hand(x: Any) -> Any:
        devices = x.reshape(4, 2, 2, 4).transpose(2, 0, 1, 3)  # [x, y, row, column]
        number = jnp.arange(8.0).reshape(2, 4)
        total = (devices * number[..., None, None]).sum((0, 1)) + devices.sum((1, 2, 3))[:, None, None] / 4
        return (jnp.tanh(total) + devices.sum((1, 2, 3))[:, None, None]).transpose(1, 0, 2).reshape(2, 8)

    other = global_function(mapped, x)
    np.testing.assert_allclose(other(x), by_hand(x), rtol=1e-4, atol=1e-4)
    gradients = [jax.grad(lambda x, f=f: _loss(f(x)))(x) for f in (other, by_hand)]
    np.testing.assert_allclose(*gradients, rtol=1e-3, atol=1e-3)


def test_unreduced_results_are_refused_with_their_line() -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])

    def total(x: Any) -> Any:
        pieces = reshard(x, NamedSharding(mesh, P("x")))
        add = lambda x: lax.pcast(x.sum(0), "x", to="unreduced")  # noqa: E731
        return jax.shard_map(add, mesh=mesh, in_specs=P("x"), out_specs=P(unreduced=frozenset({"x"})))(pieces)

    with pytest.raises(CaptureError, match=r"test_mapped_regions\.py:\d+ .*total\): .*unreduced or reduced axes \(x\)"):
        capture(total, jnp.ones((4, 4)))


def test_programs_of_pmap_are_regions() -> None:
    mapped = jax.pmap(lambda x, w: lax.pmean(jnp.tanh(x @ w), "batch"), axis_name="batch", in_axes=(0, None))
    x, w = jax.random.normal(jax.random.key(0), (8, 3, 4)), jnp.eye(4)
    other = global_function(mapped, x, w)
    np.testing.assert_allclose(other(x, w), mapped(x, w), rtol=1e-5)


@pytest.mark.parametrize("name", ["psum", "pmax", "all_gather", "psum_scatter", "all_to_all"])
def test_collectives_of_groups(name: str) -> None:
    mesh, groups = mesh_of(6), [[0, 4, 2], [5, 1, 3]]
    calls: dict[str, Callable[..., Any]] = {
        "psum": lax.psum,
        "pmax": lax.pmax,
        "all_gather": partial(lax.all_gather, tiled=True),
        "psum_scatter": partial(lax.psum_scatter, tiled=True),
        "all_to_all": partial(lax.all_to_all, split_axis=0, concat_axis=1, tiled=True),
    }
    body = lambda x: calls[name](x, "x", axis_index_groups=groups) * (1 + lax.axis_index("x"))  # noqa: E731
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    x = jax.random.normal(jax.random.key(0), (18, 4))
    np.testing.assert_allclose(global_function(mapped, x)(x), jax.jit(mapped)(x), rtol=1e-5)


def test_ragged_exchange_writes_the_rows_that_each_device_receives() -> None:
    """Compared with plain indexing, as XLA has no ragged all-to-all for CPUs."""
    n, rows = 3, 12
    rng = np.random.default_rng(0)
    sent = rng.integers(0, 4, (n, n))  # [from, to]
    starts = np.cumsum(np.pad(sent, ((0, 0), (1, 0))), 1)[:, :n]
    targets = np.cumsum(np.pad(sent, ((1, 0), (0, 0))), 0)[:n]
    x, output = rng.normal(size=(n, rows, 2)), rng.normal(size=(n, rows, 2))
    expected = output.copy()
    for i, j in np.ndindex(n, n):
        expected[j, targets[i, j] : targets[i, j] + sent[i, j]] = x[i, starts[i, j] : starts[i, j] + sent[i, j]]

    def body(*operands: Any) -> Any:
        return lax.ragged_all_to_all(*(x[0] for x in operands), axis_name="x")[None]

    mapped = jax.shard_map(body, mesh=mesh_of(n), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    operands = [jnp.asarray(x) for x in (x, output, *(v.astype("int32") for v in (starts, sent, targets, sent.T)))]
    np.testing.assert_allclose(global_function(mapped, *operands)(*operands), expected, rtol=1e-6)


def test_every_collective_of_one_device_is_the_identity_or_nothing() -> None:
    mesh = mesh_of(1)

    def body(x: Any) -> Any:
        x = lax.psum(x, "x") + lax.all_gather(x, "x", tiled=True) + lax.axis_index("x")
        return lax.all_to_all(lax.psum_scatter(x, "x", tiled=True), "x", 0, 1, tiled=True)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x"))
    x = jnp.ones((4, 4))
    np.testing.assert_array_equal(global_function(mapped, x)(x), jax.jit(mapped)(x))


@pytest.mark.parametrize("sizes", [(4,), (2, 3)])
def test_sums_of_products_of_pieces_are_contractions(sizes: tuple[int, ...]) -> None:
    names = tuple("xyz"[: len(sizes)])

    def body(x: Any, w: Any) -> Any:
        return lax.scan(lambda carry, _: (carry, lax.psum(x @ w, names)), x.sum(), None, length=2)[1]

    mapped = jax.shard_map(body, mesh=mesh_of(*sizes), in_specs=(P(None, names), P(names)), out_specs=P())
    x, w = jax.random.normal(jax.random.key(0), (2, N, N))
    program = raised(jax.make_jaxpr(mapped)(x, w))
    every = [e for eqn in program.eqns for e in (eqn, *equations(eqn))]
    (loop,) = (e for e in every if e.primitive.name == "scan")
    last = [e.primitive.name for e in equations(loop)][-1]
    assert last == "dot_general"
    assert_equal_with_gradients(mapped, x, w)


def test_a_sum_of_products_that_is_read_twice_is_one_product() -> None:
    def body(x: Any, w: Any) -> Any:
        total = lax.psum(x @ w, "x")
        return lax.psum(total, "y") + lax.psum(jnp.sin(total), "y")

    mapped = jax.shard_map(body, mesh=mesh_of(2, 3), in_specs=(P(None, ("x", "y")), P(("x", "y"))), out_specs=P())
    x, w = jax.random.normal(jax.random.key(0), (2, N, N))
    assert [e.name for e in capture(mapped, x, w).body.equations].count("dot_general") == 1
    assert_equal_with_gradients(mapped, x, w)


def test_keys_of_random_bits_are_ordinary_values() -> None:
    mesh = mesh_of(4)

    def body(key: Any, x: Any) -> Any:
        return x * jax.random.bernoulli(jax.random.fold_in(key, lax.axis_index("x")), 0.5, x.shape)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
    key, x = jax.random.key(3), jnp.ones((8, 4))
    np.testing.assert_array_equal(global_function(mapped, key, x)(key, x), jax.jit(mapped)(key, x))


def drawn_by_devices(key: Any, x: Any, number: Any) -> Any:
    """Draw with keys of which pairs of devices have the same, in every way in which JAX draws from one."""
    key = jax.random.fold_in(key, number[0])
    first, second = jax.random.split(key)
    counter = jnp.broadcast_to(number[0], (4,)).astype(jnp.uint32)
    state, raw = lax.rng_bit_generator(counter, x.shape)
    step = lambda x, key: (x * jax.random.bernoulli(key, 0.7, x.shape), None)  # noqa: E731
    dropped = lax.scan(jax.checkpoint(step), x, jax.random.split(first, 3))[0]
    of_batch = jax.vmap(lambda key: jax.random.uniform(key, x.shape))(jax.random.split(second, 2)).sum(0)
    branch = lax.cond(number[0] > 1, lambda: jax.random.uniform(key), lambda: 0.0)
    rest = jax.random.gamma(second, jnp.abs(x) + 1) + raw / 2.0**32 + state.sum() / 2.0**32
    return dropped * jax.random.uniform(first, x.shape) + of_batch + branch + rest


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("sizes", [(4,), *by_hand((2, 2))])
def test_each_piece_draws_from_its_own_key(impl: str, sizes: tuple[int, ...]) -> None:
    """Under `vmap`, JAX's generators other than threefry would draw for all pieces from the first key."""
    spec = P(tuple("xyz"[: len(sizes)]))
    mapped = jax.shard_map(drawn_by_devices, mesh=mesh_of(*sizes), in_specs=(P(), spec, spec), out_specs=spec, check_vma=False)
    key, x, number = jax.random.key(7, impl=impl), jnp.linspace(0.5, 1, 24).reshape(8, 3), jnp.arange(8) // 4
    assert_equal_with_gradients(lambda x: mapped(key, x, number), x)
    assert_equal_with_gradients(lambda x: mapped(key, x, jnp.arange(8) * 3), x)


def scaled_to_one(x: Any) -> Any:
    return x / lax.psum(x.sum(), "y")


def for_batches(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes something else under `vmap`."""
    call = jax.custom_batching.custom_vmap(fn)
    call.def_vmap(lambda size, batched, x: (jnp.cos(x) * size, True))
    return call


@pytest.mark.parametrize("where", ["", "loop", "rule"])
def test_rules_for_batches_do_not_run(where: str) -> None:
    """A device has no batch. JAX cannot differentiate such a call in a shard_map, so gradients are those without the rule."""

    def region(call: Callable[..., Any]) -> Callable[..., Any]:
        used = call
        if where == "rule":
            used = jax.custom_jvp(call)
            used.defjvp(lambda primals, tangents: (call(primals[0]), tangents[0] * call(primals[0])))
        body = (lambda x: lax.scan(lambda c, _: (used(c), None), x, None, length=2)[0]) if where == "loop" else used
        return jax.shard_map(body, mesh=mesh_of(2, 3), in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False)

    x = jax.random.uniform(jax.random.key(0), (4, 6)) + 1
    mapped, expected = region(for_batches(scaled_to_one)), region(scaled_to_one)
    run = global_function(mapped, x)
    np.testing.assert_allclose(run(x), mapped(x), rtol=1e-5)
    gradients = [jax.grad(lambda x, f=f: _loss(f(x)))(x) for f in (run, expected)]
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-5)


def test_rules_for_partitions_do_not_run() -> None:
    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        return mesh, jnp.cos, result.sharding, (arguments[0].sharding,)

    call = custom_partitioning(scaled_to_one)
    call.def_partition(partition=partition, infer_sharding_from_operands=None, sharding_rule="i j -> i j")
    mapped = jax.shard_map(call, mesh=mesh_of(2, 3), in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False)
    x = jax.random.uniform(jax.random.key(0), (4, 6)) + 1
    y = x.reshape(2, 2, 6)
    np.testing.assert_allclose(global_function(mapped, x)(x), (y / y.sum((1, 2), keepdims=True)).reshape(4, 6), rtol=1e-5)


def in_a_loop(r: Any, x: Any) -> None:
    def step(i: Any, total: Any) -> Any:
        r[0] = r[0] * x[1] + lax.axis_index("x") * i
        return total

    lax.fori_loop(0, 3, step, 0)


def in_a_scan(r: Any, x: Any) -> None:
    def step(carry: Any, v: Any) -> Any:
        r[...] += jnp.sin(r[...]) * v + lax.psum(x, "y")
        return carry, None

    lax.scan(step, 0, jnp.arange(3.0))


def in_a_branch(r: Any, x: Any) -> None:
    def change() -> None:
        r[0] = x[1] * 2

    lax.cond(lax.axis_index("x") == 1, change, lambda: None)
    lax.cond(x.sum() > 0, lambda: None, change)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("change", [in_a_loop, in_a_scan, in_a_branch])
def test_references_that_control_flow_changes_are_values(change: Callable[..., None], checked: bool) -> None:
    mesh, spec = mesh_of(2, 3), P(("x", "y"))

    def body(x: Any) -> Any:
        r = jax.new_ref(jnp.cos(x))
        change(r, x)
        return scaled(r[...]) + r[0]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=checked)
    x = jax.random.normal(jax.random.key(0), (12, 4))
    program = without_references(raised(jax.make_jaxpr(mapped)(x)))
    assert_equal_with_gradients(mapped, x)
    assert not any(is_reference(v.aval) for eqn in program.eqns for e in (eqn, *equations(eqn)) for v in e.invars)


def test_references_are_refused_with_their_line_where_they_have_no_values() -> None:
    mesh = mesh_of(4)

    def around(x: Any) -> Any:
        r = jax.new_ref(x)

        def change(r: Any) -> None:
            r[...] = r[...] * 2

        jax.shard_map(change, mesh=mesh, in_specs=P("x"), out_specs=None, check_vma=False)(r)
        return r[...]

    def printed(x: Any) -> Any:
        r = jax.new_ref(x)

        def change() -> None:
            r[0] = r[1]
            jax.debug.print("{}", r[0, 0])

        lax.cond(lax.axis_index("x") == 1, change, lambda: None)
        return r[...]

    x = jnp.ones((8, 4))
    with pytest.raises(CaptureError, match=r"test_mapped_regions\.py:\d+ .*around\): a jax.Ref made outside of a shard_map"):
        capture(around, x)
    with pytest.raises(CaptureError, match=r"test_mapped_regions\.py:\d+ .*printed\): a branch that only some .* jax.Ref"):
        capture(jax.shard_map(printed, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False), x)


def experts(w: Any, x: Any) -> Any:
    """A mixture of experts of one device: its tokens, sorted by expert, times the matrices of all experts."""
    chosen = jnp.argmax(x @ w[:, :, 0].T, -1)
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=len(w)).astype(jnp.int32)
    y = lax.ragged_dot(jax.nn.gelu(lax.ragged_dot(x[order], w, sizes)), jnp.swapaxes(w, 1, 2), sizes)
    return jnp.zeros_like(y).at[order].set(y)


@pytest.mark.parametrize("checked", [True, *by_hand(False)])
@pytest.mark.parametrize("sizes", [(4,), (2, 3)])
@pytest.mark.parametrize("looped", [False, True])
def test_ragged_products_by_matrices_that_all_devices_have(looped: bool, sizes: tuple[int, ...], checked: bool) -> None:
    """JAX batches a ragged product once, and only if its matrices are batched, too."""

    def body(w: Any, x: Any) -> Any:
        return lax.scan(lambda x, _: (x + experts(w, x), None), x, None, length=2)[0] if looped else experts(w, x)

    spec = P(tuple("xyz"[: len(sizes)]))
    mapped = jax.shard_map(body, mesh=mesh_of(*sizes), in_specs=(P(), spec), out_specs=spec, check_vma=checked)
    w, x = jax.random.normal(jax.random.key(0), (3, 4, 5)) / 4, jax.random.normal(jax.random.key(1), (24, 4))
    assert_equal_with_gradients(mapped, w, x)
    assert unparallelized(capture(lambda w, x: mapped(w, x).sum(), w, x).graph) == []


def ruled_product(x: Any, w: Any, sizes: Any) -> Any:
    """A ragged product whose gradients are twice as large."""

    @jax.custom_vjp
    def call(x: Any, w: Any, sizes: Any) -> Any:
        return lax.ragged_dot(x, w, sizes)

    def backward(residuals: Any, cotangent: Any) -> Any:
        *factors, sizes = residuals
        return *jax.vjp(lambda x, w: 2 * lax.ragged_dot(x, w, sizes), *factors)[1](cotangent), None

    call.defvjp(lambda *args: (call(*args), args), backward)
    return call(x, w, sizes)


def looped_product(x: Any, w: Any, sizes: Any) -> Any:
    return lax.scan(lambda total, w: (total + lax.ragged_dot(jnp.tanh(x), w, sizes), None), jnp.zeros((16, 5)) * x[0, 0], w[None])[
        0
    ]


PRODUCTS = {
    "alone": lax.ragged_dot,
    "checkpointed": lambda x, w, sizes: jax.checkpoint(lambda x, w: lax.ragged_dot(jnp.tanh(x), w, sizes))(x, w),
    "looped": looped_product,
    "with a rule": ruled_product,
}


@pytest.mark.parametrize("shared", [False, *by_hand(True)])
@pytest.mark.parametrize("name", ["alone", "with a rule", *by_hand("checkpointed", "looped")])
def test_ragged_products_are_batched_by_the_user_and_by_the_devices(name: str, shared: bool) -> None:
    """JAX cannot run a ragged product with two batches that it has numbered itself."""
    rng, n = np.random.default_rng(0), 4
    x = jnp.asarray(rng.normal(size=(2 * n, 16, 8)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(2 if shared else 2 * n, 4, 8, 5)), jnp.float32)
    sizes = jnp.asarray(rng.integers(0, 5, (2 * n, 4)))
    specs = P("x"), P() if shared else P("x"), P("x")
    mapped = jax.shard_map(jax.vmap(PRODUCTS[name]), mesh=mesh_of(n), in_specs=specs, out_specs=P("x"))

    def loss(fn: Any) -> Any:
        return jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(fn(x, w, sizes))), (0, 1))

    plan = unity.optimize(mapped, x, w, sizes, argnums=(0, 1), machine=unity.Machine.grid(1, n, "a100"), budget=0, progress=False)
    for ours, theirs in zip(jax.tree.leaves(jax.jit(loss(plan))(x, w)), jax.tree.leaves(loss(mapped)(x, w)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(plan(x, w, sizes), mapped(x, w, sizes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [None, "sequential", "expand_dims"])
def test_callbacks_get_the_piece_of_a_device(method: str | None) -> None:
    def on_host(x: Any, number: Any) -> Any:
        return np.sort(x, -1) * number[..., None, None]

    def body(x: Any) -> Any:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        called = lambda x: jax.pure_callback(on_host, result, x, lax.axis_index("y"), vmap_method=method)  # noqa: E731
        return called(x) + lax.scan(lambda c, _: (called(c), None), x, None, length=2)[0]

    mapped = jax.shard_map(body, mesh=mesh_of(2, 3), in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False)
    x = jax.random.normal(jax.random.key(0), (4, 6))
    np.testing.assert_allclose(global_function(mapped, x)(x), jax.jit(mapped)(x), rtol=1e-6)


def test_collectives_that_jax_traces_are_in_the_table() -> None:
    calls: list[Callable[..., Any]] = [
        lax.psum, lax.pmax, lax.pmin, lax.pmean, lax.all_gather, partial(lax.psum_scatter, tiled=True),
        lambda x, a: lax.all_to_all(x, a, 0, 0, tiled=True), lambda x, a: lax.ppermute(x, a, [(0, 1)]),
        lambda x, a: x + lax.axis_index(a), partial(lax.pbroadcast, source=1),
    ]  # fmt: skip
    traced: set[str] = set()
    for checked in (True, False):
        for call in calls:
            body = lambda x, call=call: call(x, "x").sum()[None]  # noqa: E731
            mapped = jax.shard_map(body, mesh=mesh_of(2), in_specs=P("x"), out_specs=P("x"), check_vma=checked)
            program = jax.make_jaxpr(mapped)(jnp.ones(4))
            traced |= {e.primitive.name for eqn in program.eqns for e in equations(eqn)}
            global_function(mapped, jnp.ones(4))
    expected = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all", "ppermute", "axis_index"}
    assert traced & COLLECTIVES.keys() >= expected
