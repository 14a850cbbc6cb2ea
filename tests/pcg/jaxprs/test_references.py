"""Programs that change arrays in place (`jax.Ref`): the same values and gradients from values alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.ref
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend import core

import unity
from unity.pcg.capture.capture import capture
from unity.pcg.jaxprs.references import without_references

GRADIENTS = jax.__version_info__ >= (0, 11)  # JAX 0.10 fails to differentiate most programs with references
W = jax.random.normal(jax.random.key(1), (16, 16)) * 0.2
X = jax.random.normal(jax.random.key(2), (8, 16))


def of_values(fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """A function with one result, without references."""
    program = without_references(jax.make_jaxpr(fn)(*args))
    assert "Ref" not in str(program)
    return lambda *args: core.jaxpr_as_fun(program)(*args)[0]


def accumulated(w: Any, x: Any) -> Any:
    total = jax.new_ref(jnp.zeros_like(x))

    def step(i: Any, carry: Any) -> Any:
        total[...] += jnp.tanh(x @ w) * (i + 1.0)
        return carry

    lax.fori_loop(0, 3, step, None)
    return jnp.mean(jax.freeze(total) ** 2)


def in_rows(w: Any, x: Any) -> Any:
    out = jax.new_ref(jnp.zeros_like(x))

    def step(i: Any, carry: Any) -> Any:
        out[i] = jnp.tanh(x[i] @ w)
        out[:, 3] += 1.0
        jax.ref.addupdate(out, (jnp.array([1, 2]), slice(0, 2)), jnp.ones((2, 2)) * i)
        return carry + out[(i + 1) % 8].sum()

    last = lax.fori_loop(0, 6, step, 0.0)
    lax.cond(last > 0, lambda: out.__setitem__(0, jnp.ones(16)), lambda: None)
    return jnp.mean(out[::2] ** 2) + out[jnp.array([[0, 3], [5, 6]]), 2].sum()


def over_a_reference(w: Any, x: Any) -> Any:
    out = jax.new_ref(jnp.zeros_like(x))

    def step(carry: Any, rows: Any) -> Any:
        row, own = rows
        own[...] = jnp.tanh(row @ w)
        return carry + own[...].sum(), None

    return lax.scan(step, 0.0, (x, out), reverse=True)[0] + jnp.mean(out[...] ** 2)


def of_each_row(w: Any, x: Any) -> Any:
    def of_row(v: Any) -> Any:
        row = jax.new_ref(v @ w)
        row[0] = v[1] * 2
        row[5:9] = jnp.ones(4) * v[0]
        return row[...]

    return jnp.mean(jax.vmap(of_row)(x) ** 2)


def in_a_checkpoint(w: Any, x: Any) -> Any:
    @jax.checkpoint
    def layer(x: Any) -> Any:
        h = jax.new_ref(x @ w)
        h[0] = jnp.ones(16)
        return jnp.tanh(jax.freeze(h))

    return jnp.mean(layer(x) ** 2)


@pytest.mark.parametrize("fn", [accumulated, in_rows, over_a_reference, of_each_row, in_a_checkpoint])
def test_a_program_without_references_has_the_same_values_and_gradients(fn: Callable[..., Any]) -> None:
    other = of_values(fn, W, X)
    step = partial(jax.value_and_grad, argnums=(0, 1)) if GRADIENTS else lambda f: f
    for a, b in zip(*(jax.tree.leaves(jax.jit(step(f))(W, X)) for f in (fn, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_while_loop_carries_what_it_changes() -> None:
    def fn(w: Any, x: Any) -> Any:
        state = jax.new_ref(x)

        def step(i: Any) -> Any:
            state[...] = jnp.tanh(state[...] @ w)
            return i + 1

        lax.while_loop(lambda i: i < 3, step, 0)
        return state[...].sum()

    np.testing.assert_allclose(of_values(fn, W, X)(W, X), jax.jit(fn)(W, X), rtol=1e-5)


def test_what_a_loop_only_reads_is_not_carried() -> None:
    def fn(x: Any) -> Any:
        table = jax.new_ref(x)
        return lax.scan(lambda carry, i: (carry + table[i].sum(), None), 0.0, jnp.arange(8))[0]

    program = without_references(jax.make_jaxpr(fn)(X))
    (scan,) = [e for e in program.eqns if e.primitive.name == "scan"]
    assert len(scan.outvars) == 1


def test_a_loop_without_steps_changes_nothing() -> None:
    def fn(x: Any) -> Any:
        rows = jax.new_ref(x)
        lax.scan(lambda carry, row: (carry, row.__setitem__(..., jnp.zeros(16))), 0.0, rows)
        return rows[...].sum()

    empty = jnp.zeros((0, 16))
    np.testing.assert_array_equal(of_values(fn, empty)(empty), 0.0)


def test_a_number_takes_the_type_of_the_reference() -> None:
    def fn(x: Any) -> Any:
        count = jax.new_ref(jnp.bfloat16(0))
        lax.fori_loop(0, 3, lambda i, _: count.__setitem__(..., count[...] + 0.5), None)
        return x * count[...]

    x = jnp.ones(4, jnp.bfloat16)
    assert of_values(fn, x)(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(of_values(fn, x)(x), jax.jit(fn)(x))


INDICES = st.one_of(
    st.integers(0, 3),
    st.builds(lambda start, size: slice(start, start + size), st.integers(0, 1), st.integers(1, 3)),
    st.just(slice(0, 4, 2)),
    st.just(slice(None)),
    st.integers(-9, 9).map(jnp.int32),  # a dynamic index: clamped
    st.lists(st.integers(-9, 9), min_size=2, max_size=2).map(lambda i: jnp.array(i, jnp.int32)),
)


@settings(max_examples=fewer(12), deadline=None)
@given(st.tuples(INDICES, INDICES, INDICES), st.sampled_from(["get", "set", "add"]))
def test_every_index_means_what_it_means_to_jax(index: tuple[Any, ...], how: str) -> None:
    arrays = [k for k, i in enumerate(index) if isinstance(i, jax.Array)]
    fixed = [i for k, i in enumerate(index) if k in arrays]

    def fn(x: Any, *dynamic: Any) -> Any:
        rest = iter(dynamic)
        at = tuple(next(rest) if k in arrays else i for k, i in enumerate(index))
        ref = jax.new_ref(x)
        if how == "set":
            ref[at] = jnp.cos(ref[at])
        elif how == "add":
            jax.ref.addupdate(ref, at, jnp.cos(ref[at]))
        return jnp.sin(ref[at]) if how == "get" else ref[...]

    x = jnp.arange(64.0).reshape(4, 4, 4)
    try:
        expected = jax.jit(fn)(x, *fixed)
    except (ValueError, TypeError):  # of indices that JAX does not lower
        reject()
    np.testing.assert_array_equal(of_values(fn, x, *fixed)(x, *fixed), expected)


def test_a_plan_equals_the_function() -> None:
    machine = unity.Machine.grid(1, 4)
    plan = unity.optimize(over_a_reference, W, X, argnums=(0, 1), machine=machine, budget=0, progress=False)
    actual = jax.jit(jax.value_and_grad(plan, (0, 1)))(*plan.shard(W, X))
    expected = jax.jit(jax.value_and_grad(over_a_reference, (0, 1)))(W, X)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_operators_keep_the_lines_of_changes() -> None:
    graph = capture(of_each_row, W, X).graph
    lines = {node.source.split(":")[0] for node, _ in graph.walk() if node.source}
    assert all(line.endswith("test_references.py") for line in lines), lines


@pytest.mark.parametrize("kind", ["int8", "uint32"])
def test_indices_may_be_of_any_type(kind: str) -> None:
    def fn(x: Any, i: Any) -> Any:
        ref = jax.new_ref(x)
        ref[i] = ref[i, 1] * jnp.ones(16)
        return ref[...]

    i = jnp.asarray(3, kind)
    np.testing.assert_array_equal(of_values(fn, X, i)(X, i), jax.jit(fn)(X, i))


def test_a_device_of_a_shard_map_may_change_its_own() -> None:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])

    def on_device(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[0] = lax.psum(x[1], "d")
        return jax.freeze(ref)

    def fn(x: Any) -> Any:
        spec = jax.P("d")
        return (jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x) ** 2).sum()

    plan = unity.optimize(fn, X, machine=unity.Machine.grid(1, 4), budget=0, progress=False)
    expected = X.reshape(4, 2, 16).at[:, 0].set(X.reshape(4, 2, 16)[:, 1].sum(0))
    np.testing.assert_allclose(plan(plan.shard(X)), (expected**2).sum(), rtol=1e-5)


OUTSIDE = jax.new_ref(jnp.zeros((8, 16)))


def uses_one_from_outside(x: Any) -> Any:
    OUTSIDE[...] = x
    return x.sum()


def changes_one_in_a_checkpoint(x: Any) -> Any:
    h = jax.new_ref(x)
    jax.checkpoint(lambda x: h.__setitem__(0, x[1]))(x)
    return h[...].sum()


def reads_one_as_another_shape(x: Any) -> Any:
    return jax.new_ref(x).at[1:3].at[0:1][...].sum()


def reads_one_from_outside(x: Any) -> Any:
    return x.sum() + OUTSIDE[...].sum()


def test_a_reference_is_no_argument() -> None:
    with pytest.raises(unity.CaptureError, match=r"args\[0\] is a jax\.Ref"):
        capture(lambda x: x[...].sum(), jax.new_ref(X))


def changes_one_in_a_condition(x: Any) -> Any:
    count = jax.new_ref(0)

    def more(i: Any) -> Any:
        count[...] += 1
        return i < 3

    return x.sum() + lax.while_loop(more, lambda i: i + 1, 0) + count[...]


def reads_one_in_a_loop_of_each_row(x: Any) -> Any:
    def of_row(v: Any) -> Any:
        ref = jax.new_ref(v)
        return lax.while_loop(lambda i: i < 5, lambda i: i + 1 + (ref[0] > 0).astype(int), 0)

    return jax.vmap(of_row)(x).sum() + x.sum()


@pytest.mark.parametrize(
    "fn",
    [
        uses_one_from_outside,
        reads_one_from_outside,
        changes_one_in_a_checkpoint,
        changes_one_in_a_condition,
        reads_one_in_a_loop_of_each_row,
        reads_one_as_another_shape,
    ],
)
def test_other_uses_are_refused(fn: Callable[..., Any]) -> None:
    with pytest.raises(unity.CaptureError, match=r"jax\.Ref"):
        capture(fn, X)
