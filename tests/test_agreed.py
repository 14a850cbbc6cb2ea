"""What devices agree on inside of loops and calls: how many steps all take, and whether something is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import unity
from unity.pcg.capture import capture, unparallelized
from unity.pcg.traffic import traffic

SLOW = replace(unity.Machine.grid(1, 8, "a100"), device=unity.Device("slow", {"float32": 1e7}, 2**30, 1e7, 1.0, 0.0))  # shares work


def fixed(w: Any, x: Any) -> tuple[Any, Any]:
    """Fixed points of all rows, by steps that are counted."""

    def step(carry: Any) -> Any:
        z, _, count = carry
        new = jnp.tanh(z @ w + x)
        return new, jnp.abs(new - z).max(1), count + 1

    start = jnp.zeros_like(x), jnp.full(len(x), jnp.inf), 0
    z, _, count = lax.while_loop(lambda c: (c[2] < 50) & ~jnp.all(c[1] < 1e-5), step, start)
    return z, count


def phantom(w: Any, x: Any) -> Any:
    """Differentiated by one more step."""
    z, count = jax.tree.map(lax.stop_gradient, fixed(w, x))
    return jnp.tanh(z @ w + x) * (1 + count / 64)


@jax.custom_vjp
def implicit(w: Any, x: Any) -> Any:
    return fixed(w, x)[0]


def _forward(w: Any, x: Any) -> Any:
    z, count = fixed(w, x)
    return z, (w, z, count)


def _backward(kept: Any, g: Any) -> Any:
    """As many steps back as it took."""
    w, z, count = kept
    slope = 1 - z**2
    u, _ = lax.while_loop(lambda c: c[1] < count, lambda c: (g + (c[0] * slope) @ w.T, c[1] + 1), (g, 0))
    u = u * slope
    return z.T @ u, u


implicit.defvjp(_forward, _backward)


def held(_: Any) -> Any:
    raise RuntimeError("too large")


def checked(w: Any, x: Any) -> Any:
    """As Equinox checks: where anything is wrong, the host is told."""
    y = x @ w
    wrong = lambda y: jnp.broadcast_to(jax.pure_callback(held, jax.ShapeDtypeStruct((16,), y.dtype), 0), y.shape)  # noqa: E731
    return lax.cond((jnp.abs(y) > 1e3).any(), wrong, jnp.sin, y)


solve_p = Primitive("other_solve")  # as Lineax' solves: by factors that are handed to it and may not be differentiated
solve_p.def_impl(lambda a, factor, y: _by_factor(factor, y))
solve_p.def_abstract_eval(lambda a, factor, y: ShapedArray(y.shape, y.dtype))
mlir.register_lowering(solve_p, mlir.lower_fun(solve_p.impl, multiple_results=False))
batching.primitive_batchers[solve_p] = lambda given, dims: (solve_p.bind(*given), 0)


def _by_factor(factor: Any, y: Any) -> Any:
    whole = lambda f, y: jax.scipy.linalg.cho_solve((f, True), y)  # noqa: E731
    return jax.vmap(whole)(factor, y) if y.ndim == 2 else whole(factor, y)


def _derivative(primals: Any, tangents: Any) -> Any:
    (a, factor, y), (da, df, dy) = primals, tangents
    if not isinstance(df, ad.Zero):
        raise RuntimeError("the factor cannot be differentiated")
    x = solve_p.bind(a, factor, y)
    dy = jnp.zeros_like(y) if isinstance(dy, ad.Zero) else dy
    return x, solve_p.bind(a, factor, dy if isinstance(da, ad.Zero) else dy - jnp.einsum("...ij,...j->...i", da, x))


ad.primitive_jvps[solve_p] = _derivative
ad.primitive_transposes[solve_p] = lambda g, a, factor, y: (None, None, solve_p.bind(a, factor, g))  # symmetric


def solved(w: Any, x: Any) -> Any:
    def row(x: Any) -> Any:
        a = jnp.eye(16) + jnp.outer(x, x) + w @ w.T
        return solve_p.bind(a, lax.stop_gradient(jnp.linalg.cholesky(a)), x)

    return jax.vmap(row)(x)


@pytest.mark.parametrize("rows", [phantom, implicit, checked, solved])
def test_rows_are_divided(rows: Any) -> None:
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s) * 0.1, jnp.float32) for s in ((16, 16), (64, 16)))

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(rows(w, x) ** 2)

    assert not unparallelized(capture(loss, w, x).graph)
    plan = unity.optimize(loss, w, x, machine=SLOW, rules=[], progress=False)
    assert plan.in_shardings[1].shard_shape(x.shape)[0] < len(x)
    assert not [node for node in plan.pcg.nodes if node.kind == "combine"]
    found, wanted = (jax.jit(jax.value_and_grad(f))(*a) for f, a in ((plan, plan.shard(w, x)), (loss, (w, x))))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found, wanted)


def test_what_devices_agree_on_is_counted() -> None:
    plan = unity.optimize(
        lambda w, x: fixed(w, x)[0], *(jnp.ones(s) for s in ((16, 16), (64, 16))), machine=SLOW, training=False, progress=False
    )
    (agreed,) = (c for c in traffic(plan.pcg) if c.kind == "all-reduce")
    assert (agreed.elements, agreed.itemsize) == (1, 1)
