"""Loops whose rows finish independently: they are recognized, and each device takes as many steps as its own rows need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint
from jax.scipy.sparse.linalg import cg

import unity
from unity.pcg.ir.program import Equation, close
from unity.pcg.propagation.nested.row_loops import Rows, rows_of

SLOW = replace(unity.Machine.grid(1, 8, "a100"), device=unity.Device("slow", {"float32": 1e7}, 2**30, 1e7, 1.0, 0.0))  # shares work
X, K = np.ones((4, 6), np.float32), np.arange(4)


def loop_of(fn: Callable, *args: Any) -> Equation:
    (loop,) = (e for e in close(jax.make_jaxpr(fn)(*args)).equations if e.name == "while")
    return loop


def test_a_loop_under_vmap_has_rows() -> None:
    def row(x: jax.Array, k: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: (c[0] < k) & (c[1].sum() < 9), lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]

    assert rows_of(loop_of(jax.vmap(row), X, K)) == Rows(0, False, ((0,), (0,), (0,)))
    assert rows_of(loop_of(row, X[0], K[0])) is None
    grid = jax.vmap(jax.vmap(row, (0, None)), (None, 0))
    assert rows_of(loop_of(grid, X, K)) == Rows(0, False, ((0, 1), (0, 1), (0, 1)))
    steps = jax.vmap(jax.vmap(lambda x, k: lax.fori_loop(0, k, lambda _, x: jnp.sin(x), x), (0, None)), (None, 0))
    found = rows_of(loop_of(steps, X, K))
    assert found is not None
    assert {len(dims) for dims in found.dims if dims is not None} == {1}


Step = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def by_hand(step: Step, more: Callable = lambda done: ~jnp.all(done)) -> Equation:
    """Return a loop that carries `x` and flags of its finished rows."""
    return loop_of(lambda x, done: lax.while_loop(lambda c: more(c[1]), lambda c: step(*c), (x, done)), X, K > 5)


def held(x: jax.Array, done: jax.Array) -> jax.Array:
    return jnp.where(done[:, None], x, jnp.sin(x))


def test_a_handwritten_loop_has_rows() -> None:
    assert rows_of(by_hand(lambda x, done: (held(x, done), done | (x.sum(1) < 1)))) == Rows(1, True, ((0,), (0,)))
    assert rows_of(by_hand(lambda x, done: (held(x, done), (x.sum(1) < 1) | done))) == Rows(1, True, ((0,), (0,)))
    going = by_hand(lambda x, going: (jnp.where(going[:, None], x + 1, x), going & (x.sum(1) < 9)), jnp.any)
    assert rows_of(going) == Rows(1, False, ((0,), (0,)))

    def turning(x: jax.Array, y: jax.Array, done: jax.Array) -> Any:
        body = lambda c: (jnp.where(c[2][:, None], c[0], c[0] + c[1]), c[1], c[2] | (c[0].sum(1) > 9))  # noqa: E731
        return lax.while_loop(lambda c: ~jnp.all(c[2]), body, (x, y, done))

    found = rows_of(loop_of(turning, X, X, K > 5))
    assert found in (Rows(2, True, ((0,), None, (0,))), Rows(1, True, ((0,), (0,))))  # JAX may take what stays the same out


@pytest.mark.parametrize(
    ("step", "more"),
    [
        (lambda x, done: (held(x, done), x.sum(1) < 1), lambda done: ~jnp.all(done)),  # a row may go on again
        (lambda x, done: (jnp.sin(x), done | (x.sum(1) < 1)), lambda done: ~jnp.all(done)),  # one that is done is changed
        (lambda x, done: (held(x + 1, done), done | (x.sum(1) < 1)), lambda done: ~jnp.all(done)),
        (lambda x, done: (jnp.where(done[:, None], jnp.sin(x), x), done | (x.sum(1) < 1)), lambda done: ~jnp.all(done)),
        (lambda x, done: (held(x, done), done & (x.sum(1) < 1)), lambda done: ~jnp.all(done)),
        (lambda x, done: (held(x, done), done | (x.sum(1) < 1)), lambda done: ~jnp.any(done)),  # the first that is done ends it
        (lambda x, done: (held(x, done), done | (x.sum(1) < 1)), jnp.all),
        (lambda x, done: (held(x, done), done | (x.sum(1) < 1)), lambda done: ~done[0]),
        (lambda x, done: (jnp.where(done.all(), x, jnp.sin(x)), done | (x.sum(1) < 1)), lambda done: ~jnp.all(done)),
        (lambda x, done: (jnp.where(~done[:, None], x, jnp.sin(x)), done | (x.sum(1) < 1)), lambda done: ~jnp.all(done)),
    ],
)
def test_a_loop_that_changes_finished_rows_has_none(step: Step, more: Callable) -> None:
    assert rows_of(by_hand(step, more)) is None


def solved(w: jax.Array, y: jax.Array) -> jax.Array:
    """Solve for each row by conjugate gradients, with an implicit derivative; rows need from 1 to 20 steps."""
    return jax.vmap(lambda y: cg(lambda v: v + w.T @ (w @ v), y, maxiter=20, tol=1e-5)[0])(y)


def flown(w: jax.Array, y: jax.Array) -> jax.Array:
    """Integrate each row with adaptive steps, and an adjoint that does so backward."""
    times = jnp.array([0.0, 1.0])
    return jax.vmap(lambda y: odeint(lambda y, _: jnp.tanh(w @ y) - y, y, times, rtol=1e-5, atol=1e-5)[-1])(y)


@pytest.mark.parametrize("rows", [solved, flown])
def test_devices_take_the_steps_that_their_rows_need(rows: Callable) -> None:
    rng = np.random.default_rng(0)
    w, y = 0.3 * rng.normal(size=(16, 16)), rng.normal(size=(64, 16)) * np.linspace(0.01, 3, 64)[:, None]
    w, y = jnp.asarray(w, jnp.float32), jnp.asarray(y, jnp.float32)

    def loss(w: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean(rows(w, y) ** 2)

    plan = unity.optimize(loss, w, y, machine=SLOW, progress=False)
    assert plan.in_shardings[1].shard_shape(y.shape) == (8, 16), repr(plan)
    assert not [node for node in plan.program.pcg.nodes if node.kind == "combine"]
    found, wanted = (jax.jit(jax.value_and_grad(f))(*a) for f, a in ((plan, plan.shard(w, y)), (loss, (w, y))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, wanted)
