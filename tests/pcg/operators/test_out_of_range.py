"""Indices out of range: plans read, write and differentiate there as JAX does on one device, however they divide what is indexed.

What JAX does depends on the mode. CLIP takes the nearest row, whose gradient it is. FILL_OR_DROP reads a constant and drops what is
written. A promise reads the nearest row, and drops what is written, the gradient of what it read included.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import one_in
from jax import lax
from jax.sharding import PartitionSpec as P
from parallel_cases import Application

import unity

MODES = ("clip", "fill", "promise_in_bounds")
DTYPES = ("int8", "uint8", "int16", "int32", "uint32", "int64", "uint64")
AXES = (2, 3)  # every choice on one of them alone, on both, and pairs of choices, inner digits included
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def exact():
    with jax.enable_x64(True):
        yield


def n(*shape):
    return RNG.normal(size=shape)


def around(rows, count, dtype="int32"):
    """Return indices inside a table, at its borders, just outside, far outside, and the extremes of their type."""
    info = np.iinfo(dtype)
    sharp = [0, rows - 1, -1, rows, -rows, -rows - 1, rows + 1, 2 * rows, info.min, info.max, info.max - 1, rows // 2]
    fitting = [k for k in sharp if info.min <= k <= info.max]
    inside = RNG.integers(0, min(rows, info.max), max(count - len(fitting), 0)).tolist()
    return np.array([*fitting, *inside], dtype)[:count]


def rows_of(mode, **flags):
    """Return a look-up of rows without JAX's arithmetic for negative indices."""

    def fn(table, ids):
        numbers = lax.GatherDimensionNumbers(offset_dims=(ids.ndim,), collapsed_slice_dims=(0,), start_index_map=(0,))
        return lax.gather(table, ids[..., None], numbers, (1, table.shape[1]), mode=mode, **flags)

    return fn


TABLES = [(mode, *table) for mode in MODES for table in (*((dtype, 12) for dtype in DTYPES), ("int8", 300), ("uint8", 300))]


@pytest.mark.parametrize(("mode", "dtype", "rows"), one_in(2, TABLES))
def test_rows_are_taken_as_one_device_takes_them(mode, dtype, rows):
    every = Application(rows_of(mode), [n(rows, 6), around(rows, 18, dtype)], AXES).check()
    assert all(any(c.operands[0][k].dim == 0 for c in every) for k in range(len(AXES)))


def windows(x, i):
    """Return windows of two rows, which JAX moves inside the table."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
    return lax.gather(x, i[:, None], numbers, (2, x.shape[1]), mode="promise_in_bounds")


READERS = {
    "at, as it is": lambda x, i: x[i],
    "at, clipped": lambda x, i: x.at[i].get(mode="clip"),
    "at, filled": lambda x, i: x.at[i].get(mode="fill", fill_value=7),
    "at, filled with infinity": lambda x, i: x.at[i].get(mode="fill", fill_value=np.inf),
    "at, sorted": lambda x, i: x.at[jnp.sort(i)].get(indices_are_sorted=True),
    "at, columns": lambda x, i: x[:, i],
    "at, several columns and rows": lambda x, i: x[i, i[:6, None]],
    "at, several, clipped": lambda x, i: x.at[i, i[::-1]].get(mode="clip"),
    "at, several, filled": lambda x, i: x.at[i, i[::-1]].get(mode="fill"),
    "take, clipped": lambda x, i: jnp.take(x, i, axis=1, mode="clip"),
    "take, wrapped": lambda x, i: jnp.take(x, i, axis=0, mode="wrap"),
    "take_along_axis": lambda x, i: jnp.take_along_axis(x, jnp.broadcast_to(i[None], (x.shape[0], i.size)), 1),
    "take_along_axis, clipped": lambda x, i: jnp.take_along_axis(x, jnp.tile(i[:, None], 12), 0, mode="clip"),
    "take_along_axis, promised": lambda x, i: jnp.take_along_axis(x, i[:12, None], 1, mode="promise_in_bounds"),
    "one_hot": lambda x, i: jax.nn.one_hot(i, x.shape[0]) @ x,
    "vmapped": lambda x, i: jax.vmap(lambda row, k: row[k])(x, i[:12]),
    "vmapped, clipped": lambda x, i: jax.vmap(lambda row, k: row.at[k].get(mode="clip"))(x, i[:12]),
    "vmapped indices": lambda x, i: jax.vmap(lambda k: x[k])(i),
    "windows": windows,
    "dynamic_slice": lambda x, i: jnp.stack([lax.dynamic_slice(x, (i[k], i[k + 1]), (5, 12)) for k in range(11)]),
    "dynamic_slice, vmapped": lambda x, i: jax.vmap(lambda k: lax.dynamic_slice(x, (k, k), (5, 12)))(i),
    "dynamic_slice of rows, vmapped": lambda x, i: jax.vmap(lambda row, k: lax.dynamic_slice(row, (k,), (5,)))(x, i[:12]),
    "dynamic_index": lambda x, i: jnp.stack([lax.dynamic_index_in_dim(x, i[k], 0) for k in range(11)]),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_reads_by_indices_equal_those_of_one_device(name):
    Application(READERS[name], [n(12, 12), around(12, 18)], AXES).check()


def written(how, **given):
    def fn(x, i, u):
        return getattr(x.at[i], how)(u, **given)

    return fn


WRITERS = {
    **{f"add, {mode}": written("add", mode=mode) for mode in MODES if mode != "fill"},
    "add, dropped": written("add", mode="drop"),
    "subtract": written("subtract"),
    **{f"multiply, {mode}": written("multiply", mode=mode, unique_indices=True) for mode in ("drop", "promise_in_bounds")},
    **{f"set, {mode}": written("set", mode=mode) for mode in ("drop", "promise_in_bounds")},
    "max": lambda x, i, u: lax.stop_gradient(x).at[i].max(lax.stop_gradient(u), mode="clip"),
    "min, dropped": lambda x, i, u: lax.stop_gradient(x).at[i].min(lax.stop_gradient(u)),
    "min, promised": lambda x, i, u: lax.stop_gradient(x).at[i].min(lax.stop_gradient(u), mode="promise_in_bounds"),
    "apply": lambda x, i, u: lax.stop_gradient(x).at[i].apply(lambda v: 3 * v + 1),
    "columns": lambda x, i, u: x.at[:, i].add(u.T, mode="promise_in_bounds"),
    "pairs": lambda x, i, u: x.at[i, i[::-1]].add(u[:, 0], mode="promise_in_bounds"),
    "segment_sum": lambda x, i, u: x + jax.ops.segment_sum(u, i, 12),
    "segment_sum, sorted": lambda x, i, u: x + jax.ops.segment_sum(u, jnp.sort(i), 12, indices_are_sorted=True),
    "segment_sum, clipped": lambda x, i, u: x + jax.ops.segment_sum(u, i, 12, mode="clip"),
    "segment_max": lambda x, i, u: jax.ops.segment_max(lax.stop_gradient(u), i, 12),
    "vmapped": lambda x, i, u: jax.vmap(lambda row, k, v: row.at[k].add(v))(x, i[:12], u[:12, 0]),
    "vmapped, clipped": lambda x, i, u: jax.vmap(lambda row, k, v: row.at[k].add(v, mode="clip"))(x, i[:12], u[:12, 0]),
    "vmapped, set": lambda x, i, u: jax.vmap(lambda row, k, v: row.at[k].set(v))(x, i[:12], u[:12, 0]),
    "dynamic_update_slice": lambda x, i, u: sum(lax.dynamic_update_slice(x, u[:5], (i[k], i[k + 1])) for k in range(11)),
    "dynamic_update_slice, vmapped": lambda x, i, u: jax.vmap(lambda r, k: lax.dynamic_update_slice(r, u[0, :5], (k,)))(x, i[:12]),
    "dynamic_update_index": lambda x, i, u: sum(lax.dynamic_update_index_in_dim(x, u[0], i[k], 0) for k in range(11)),
}  # fmt: skip


def distinct(ids):
    """Keep the first of equal indices and replace the others by one outside."""
    wrapped = np.where(ids < 0, ids + 12, ids)
    first = np.isin(np.arange(ids.size), np.unique(wrapped, return_index=True)[1])
    return np.where(first, ids, 100 + np.arange(ids.size)).astype(ids.dtype)


@pytest.mark.parametrize("name", WRITERS)
def test_writes_by_indices_equal_those_of_one_device(name):
    ids = distinct(around(12, 18)) if name.split(",")[0] in ("multiply", "set") else around(12, 18)
    Application(WRITERS[name], [n(12, 12), ids, n(18, 12)], AXES).check()


MACHINE = unity.Machine.grid(1, 4, "v100")
LIES = [P("device"), P(None, "device"), P(2, 2)]


def coupled(table, w, ids, mode):
    """Return a loss that couples rows read outside with rows read inside, so that second derivatives depend on all of them."""
    found = table.at[ids].get(mode=mode, **({"fill_value": 0} if mode == "fill" else {}))
    return jnp.sum(jnp.sin(found @ w).sum(0) ** 2)


@pytest.mark.parametrize(("mode", "lies"), one_in(2, itertools.product(MODES, LIES)), ids=str)
def test_plans_have_first_and_second_derivatives_of_one_device(mode, lies, own_cache):
    fn, table, w, ids = partial(coupled, mode=mode), n(8, 4), n(4, 3), around(8, 16)
    plan = unity.optimize(fn, table, w, ids, machine=MACHINE, constraints=[unity.pin("table", lies)], progress=False)
    agree(plan, fn, table, w, ids)


def agree(plan, fn, params, *args):
    """Compare values, gradients, and both kinds of second derivatives of a plan with the function's."""

    def slope(compute, given, turned):
        gradient = jax.grad(compute, 0)
        along = jax.tree.map(jnp.cos, given[0])
        pushed = jax.jvp(lambda p: gradient(p, *given[1:]), (given[0],), (along,))[1]
        squares = jax.grad(lambda p: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(gradient(p, *given[1:]))))(given[0])
        return compute(*given), *map(turned, (gradient(*given), pushed, squares))

    wanted = jax.jit(lambda *given: slope(fn, given, lambda x: x))(params, *args)
    found = jax.jit(lambda *given: slope(plan, given, lambda x: x))(*plan.shard(params, *args))
    for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
        for x, y in zip(jax.tree.leaves(plan.shard.unpack(a) if k else a), jax.tree.leaves(b), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


def stacked_rows(params, ids, mode):
    found = [table.at[ids[:, k]].get(mode=mode) for k, table in enumerate(params["tables"])]
    return jnp.sum(jnp.sin(jnp.concatenate(found, 1) @ params["w"]).sum(0) ** 2)


@pytest.mark.parametrize("mode", ["clip", "promise_in_bounds"])
def test_stacked_tables_have_first_and_second_derivatives_of_one_device(mode, own_cache):
    rows = 40001, 20002, 10003, 5001
    fn = partial(stacked_rows, mode=mode)
    params = {"tables": [n(k, 5) for k in rows], "w": n(5 * len(rows), 3)}
    ids = np.stack([around(k, 64) for k in rows], 1)
    plan = unity.optimize(fn, params, ids, machine=MACHINE, progress=False, branches=False, pack=True)
    assert plan.program.rewriting
    assert any(str(rule).startswith(("merge-tables", "look-up-in-second")) for rule, _ in plan.program.rewriting.applied)
    agree(plan, fn, params, ids)
