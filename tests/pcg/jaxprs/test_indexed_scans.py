"""Loops that read and write rows by a counter become scans of stacks, and compute what they did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend import core

from unity.pcg.jaxprs.indexed_scans import with_stacked_scans
from unity.pcg.jaxprs.jaxprs import SCANNED, equations

LOOK_UPS = {"dynamic_slice", "dynamic_update_slice", "gather", "scatter", "scatter-add"}
ROWS, COLUMNS = 5, 4
Loop = Callable[[Any, Any], Any]


def counted(step: Callable[[Any, Any, Any], Any], first: int = 0, last: int = ROWS) -> Loop:
    """Return a loop that carries a row and an array, and whose steps get the counter, the row and the array that is read."""

    def loop(x: Any, y: Any) -> Any:
        def one(t: Any, state: Any) -> Any:
            row, out = state
            row = jnp.sin(row) + step(x, t, row)
            return row, out.at[t].set(row)

        return lax.fori_loop(first, last, one, (y[0], y))

    return loop


def reversed_writes(x: Any, y: Any) -> Any:
    def one(t: Any, state: Any) -> Any:
        row, out = state
        row = jnp.cos(row) * x[ROWS - 1 - t]
        return row, out.at[ROWS - 1 - t].set(row)

    return lax.fori_loop(0, ROWS, one, (y[0], y))


def columns(x: Any, y: Any) -> Any:
    def one(t: Any, state: Any) -> Any:
        column, out = state
        column = jnp.tanh(column + x[:, t])
        return column, out.at[:, t].set(column)

    return lax.fori_loop(0, COLUMNS, one, (y[:, 0], y))


def added_columns(x: Any, y: Any) -> Any:
    def one(t: Any, state: Any) -> Any:
        column, out = state
        column = jnp.tanh(column + x[:, t - 1])
        return column, out.at[:, t].add(column)

    return lax.fori_loop(1, COLUMNS, one, (y[:, 0], y))


def updated(x: Any, y: Any) -> Any:
    def one(t: Any, state: Any) -> Any:
        row, out = state
        row = jnp.tanh(row + lax.dynamic_index_in_dim(x, t, 0, keepdims=False))
        return row, lax.dynamic_update_slice(out, row[None], (t, 0))

    return lax.fori_loop(1, ROWS - 1, one, (y[0], y))


def numbered(numbers: Callable[[], Any], reverse: bool = False) -> Loop:
    """Return a scan over numbers that are made outside of it."""

    def loop(x: Any, y: Any) -> Any:
        def one(state: Any, t: Any) -> Any:
            row, out = state
            row = jnp.sin(row + x[t])
            return (row, out.at[t].add(row)), row.sum()

        return lax.scan(one, (y[0], y), numbers(), reverse=reverse)

    return loop


def each(loop: Loop) -> Loop:
    return lambda x, y: jax.vmap(loop, (0, None))(jnp.stack([x, 2 * x]), y)


def unchanged_carry(x: Any, y: Any) -> Any:
    return lax.fori_loop(0, ROWS, lambda t, state: (state[0], jnp.sin(state[1] + state[0][t])), (x, y[0]))


def within(x: Any, y: Any) -> Any:
    """A loop in the steps of another."""
    return lax.fori_loop(0, COLUMNS, lambda k, y: y.at[:, k].set(updated(x, y)[1].sum(1) * x[:, k]), y)


STACKED: dict[str, Loop] = {
    "rows": counted(lambda x, t, row: x[t] * row),
    "row and the next": counted(lambda x, t, row: x[t] * x[t + 1], 0, ROWS - 1),
    "rows by take": counted(lambda x, t, row: jnp.take(x, t, axis=0)),
    "rows in a jit": counted(lambda x, t, row: jax.jit(lambda x, t: jnp.exp(x[t]))(x, t)),
    "rows beside a jit": counted(lambda x, t, row: jnp.where(row > 0.1, x[t], 0.0)),
    "reversed": reversed_writes,
    "columns": columns,
    "added columns": added_columns,
    "updated": updated,
    "arange": numbered(lambda: jnp.arange(ROWS)),
    "arange, from the last": numbered(lambda: jnp.arange(ROWS), reverse=True),
    "numbers, turned": numbered(lambda: jnp.arange(1, ROWS)[::-1]),
    "numbers, falling": numbered(lambda: ROWS - 1 - jnp.arange(ROWS), reverse=True),
    "vmap": each(columns),
    "vmap of rows": each(updated),
    "a carry that stays": unchanged_carry,
}
KEPT: dict[str, Loop] = {
    "every second row": lambda x, y: lax.fori_loop(0, 2, lambda t, c: jnp.sin(c + x[2 * t]), y[0]),
    "one row": lambda x, y: lax.fori_loop(0, ROWS, lambda t, c: jnp.sin(c + x[t // ROWS]), y[0]),
    "rows to behind the last": lambda x, y: lax.fori_loop(0, ROWS, lambda t, c: jnp.sin(c + x[t + 1]), y[0]),
    "two rows": lambda x, y: lax.fori_loop(0, ROWS - 1, lambda t, c: c + lax.dynamic_slice(x, (t, 0), (2, COLUMNS)), y[:2]),
    "a diagonal": lambda x, y: lax.fori_loop(0, COLUMNS, lambda t, c: jnp.sin(c + x[t, t]), y[0]),
    "rows that were written": lambda x, y: lax.fori_loop(1, ROWS, lambda t, c: c.at[t].set(jnp.sin(c[t - 1] + x[0])), y),
    "rows dropped": lambda x, y: lax.fori_loop(1, ROWS + 1, lambda t, c: c.at[t].set(x[0] * t), y),
    "rows that a carry chooses": lambda x, y: lax.fori_loop(
        0, ROWS, lambda t, c: ((c[0] * 3 + 1) % ROWS, c[1] + x[c[0]]), (0, y[0])
    )[1],
}  # fmt: skip


def rewritten(loop: Loop, *arguments: Any) -> tuple[Loop, list[str]]:
    """Return a loop with stacks, and the look-ups that are left in its steps."""
    closed, tree = jax.make_jaxpr(loop, return_shape=True)(*arguments)
    changed = with_stacked_scans(closed)
    every = [e for top in changed.jaxpr.eqns for e in (top, *equations(top))]
    left = [i.primitive.name for e in every if e.primitive.name in SCANNED for i in equations(e)]
    run = core.jaxpr_as_fun(changed)
    return lambda x, y: jax.tree.unflatten(jax.tree.structure(tree), run(x, y)), [n for n in left if n in LOOK_UPS]


def total(loop: Loop) -> Loop:
    return lambda x, y: sum((jnp.sin(v) * (1 + jnp.arange(v.size).reshape(v.shape))).sum() for v in jax.tree.leaves(loop(x, y)))


def assert_same(loop: Loop, other: Loop, x: Any, y: Any) -> None:
    one, two = (jax.value_and_grad(total(f), (0, 1))(x, y) for f in (loop, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), one, two)


def data(*shape: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=shape)), jnp.asarray(rng.normal(size=shape))


@pytest.mark.parametrize("name", STACKED)
def test_rows_by_a_counter_are_stacks(name: str) -> None:
    with jax.enable_x64(True):
        x, y = data(ROWS, COLUMNS)
        other, left = rewritten(STACKED[name], x, y)
        assert not left
        assert_same(STACKED[name], other, x, y)


@pytest.mark.parametrize("name", KEPT)
def test_other_indices_stay(name: str) -> None:
    with jax.enable_x64(True):
        x, y = data(ROWS, COLUMNS)
        other, left = rewritten(KEPT[name], x, y)
        assert left
        assert_same(KEPT[name], other, x, y)


def test_loops_in_loops_have_stacks() -> None:
    with jax.enable_x64(True):
        x, y = data(ROWS, COLUMNS)
        other, left = rewritten(within, x, y)
        assert "dynamic_slice" not in left
        assert_same(within, other, x, y)


def test_integers_are_stacks_only_in_the_order_of_the_steps() -> None:
    """They have no gradients, so that a stack in another order would be a copy for nothing."""

    def loop(labels: Any, y: Any) -> Any:
        return lax.fori_loop(0, ROWS, lambda t, c: jnp.sin(c * labels[t] + labels[ROWS - 1 - t]), y)

    left = rewritten(loop, jnp.arange(ROWS) * 3, jnp.ones(COLUMNS))[1]
    assert left == ["dynamic_slice"]


@given(
    st.integers(2, 6), st.integers(0, 3), st.integers(0, 3), st.sampled_from([1, -1]), st.sampled_from([1, -1]), st.integers(0, 1),
    st.booleans(), st.booleans(),
)  # fmt: skip
@settings(max_examples=fewer(8), deadline=None)
def test_loops_compute_what_they_did(
    length: int, first: int, other: int, reads: int, writes: int, dim: int, adds: bool, reverse: bool
) -> None:
    """Whatever part of which dimension is read and written, in which order, and whether it lies in the arrays."""

    def index(t: Any, start: int, by: int) -> tuple[Any, ...]:
        return (slice(None),) * dim + (start + (t if by > 0 else length - 1 - t),)

    def loop(x: Any, y: Any) -> Any:
        def one(state: Any, t: Any) -> Any:
            row, out = state
            row = jnp.sin(row) + x[index(t, first, reads)]
            at = out.at[index(t, other, writes)]
            return (row, at.add(row) if adds else at.set(row)), row[0]

        return lax.scan(one, (jnp.zeros(6), y), jnp.arange(length), reverse=reverse)

    with jax.enable_x64(True):
        x, y = data(6, 6)
        assert_same(loop, rewritten(loop, x, y)[0], x, y)


def over(numbers: Callable[[], Any]) -> Loop:
    """Return a scan over numbers that are not in order, or not small."""

    def loop(x: Any, y: Any) -> Any:
        def one(state: Any, t: Any) -> Any:
            row, out = state
            row = jnp.tanh(row + x[t])
            return (row, out.at[t].add(row)), None

        return lax.scan(one, (y[0], y), numbers())[0]

    return loop


def flagged(x: Any, y: Any) -> Any:
    return lax.fori_loop(0, ROWS, lambda t, state: (1, jnp.sin(state[1] + x[t])), (0, y[0]))


def falling(x: Any, y: Any) -> Any:
    def one(state: Any, _: Any) -> Any:
        t, row = state
        return (t + jnp.uint64(2**64 - 1), jnp.sin(row + x[t])), None

    return lax.scan(one, (jnp.uint64(ROWS - 1), y[0]), None, length=ROWS)[0][1]


# Each was another program, or an error, when it was found.
TRAPS: dict[str, tuple[Loop, int]] = {
    "reversed columns": (over(lambda: jnp.arange(6).reshape(2, 3)[:, ::-1].reshape(6)), 6),
    "reversed along no dimension": (over(lambda: lax.rev(jnp.arange(6), ())), 6),
    "wrapped bytes": (over(lambda: lax.iota(jnp.uint8, 300)), 300),
    "wrapped bytes, converted": (over(lambda: lax.iota(jnp.int8, 200).astype(jnp.int32)), 200),
    "rounded numbers": (over(lambda: lax.iota(jnp.bfloat16, 300).astype(jnp.int32)), 300),
    "a flag in the carry": (flagged, ROWS),
    "a falling counter without a sign": (falling, ROWS),
}


@pytest.mark.parametrize("name", TRAPS)
def test_other_numbers_than_a_counter_keep_their_values(name: str) -> None:
    with jax.enable_x64(True):
        loop, rows = TRAPS[name]
        x, y = data(rows, 2)
        assert_same(loop, rewritten(loop, x, y)[0], x, y)


def test_functions_that_are_applied_to_rows_stay() -> None:
    def loop(x: Any, y: Any) -> Any:
        return lax.fori_loop(0, ROWS, lambda t, c: c.at[t].apply(jnp.cos), y) * x

    x, y = data(ROWS, COLUMNS)
    other, left = rewritten(loop, x, y)
    assert left
    np.testing.assert_array_equal(other(x, y), loop(x, y))


def test_rows_to_which_nothing_is_added_keep_the_sign_of_zero() -> None:
    def loop(x: Any, y: Any) -> Any:
        return 1 / lax.fori_loop(1, ROWS - 1, lambda t, c: c.at[t].add(x[t]), -jnp.zeros_like(y))

    x, y = data(ROWS, COLUMNS)
    other, left = rewritten(loop, x, y)
    assert not left
    np.testing.assert_array_equal(other(x, y), loop(x, y))


def test_rows_are_stacked_without_their_dimension() -> None:
    """Otherwise JAX would stack the squeezed rows once more for the derivative."""

    def loop(x: Any, y: Any) -> Any:
        return lax.fori_loop(0, ROWS, lambda t, row: jnp.sin(row * lax.dynamic_index_in_dim(x, t, keepdims=False)), y[0])

    changed = with_stacked_scans(jax.make_jaxpr(loop)(*data(ROWS, COLUMNS)))
    every = [e for top in changed.jaxpr.eqns for e in (top, *equations(top))]
    (scan,) = [e for e in every if e.primitive.name in SCANNED]
    assert "squeeze" not in {e.primitive.name for e in equations(scan)}
