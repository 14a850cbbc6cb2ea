"""Agreements of devices inside loops and calls: the number of steps that all take, and whether an error has occurred."""

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
from unity.pcg.capture.capture import capture, unparallelized
from unity.pcg.ir.program import close
from unity.pcg.parallel.traffic import traffic
from unity.pcg.propagation.choices import choices
from unity.pcg.types.parallel_type import partitioned

SLOW = replace(unity.Machine.grid(1, 8, "a100"), device=unity.Device("slow", {"float32": 1e7}, 2**30, 1e7, 1.0, 0.0))  # shares work


def fixed(w: Any, x: Any) -> tuple[Any, Any]:
    """Return the fixed points of all rows and the number of steps."""

    def step(carry: Any) -> Any:
        z, _, count = carry
        new = jnp.tanh(z @ w + x)
        return new, jnp.abs(new - z).max(1), count + 1

    start = jnp.zeros_like(x), jnp.full(len(x), jnp.inf), 0
    z, _, count = lax.while_loop(lambda c: (c[2] < 50) & ~jnp.all(c[1] < 1e-5), step, start)
    return z, count


def phantom(w: Any, x: Any) -> Any:
    """Return a fixed point that is differentiated through one further step."""
    z, count = jax.tree.map(lax.stop_gradient, fixed(w, x))
    return jnp.tanh(z @ w + x) * (1 + count / 64)


@jax.custom_vjp
def implicit(w: Any, x: Any) -> Any:
    return fixed(w, x)[0]


def _forward(w: Any, x: Any) -> Any:
    z, count = fixed(w, x)
    return z, (w, z, count)


def _backward(kept: Any, g: Any) -> Any:
    """Take as many steps backward as forward."""
    w, z, count = kept
    slope = 1 - z**2
    u, _ = lax.while_loop(lambda c: c[1] < count, lambda c: (g + (c[0] * slope) @ w.T, c[1] + 1), (g, 0))
    u = u * slope
    return z.T @ u, u


implicit.defvjp(_forward, _backward)


def held(_: Any) -> Any:
    raise RuntimeError("too large")


def checked(w: Any, x: Any) -> Any:
    """Check a condition as Equinox does: call the host if it fails anywhere."""
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


def handed(w: Any, x: Any) -> Any:
    """Forward unrelated values through a check, as Equinox does."""
    y = x @ w

    def wrong(*every: Any) -> Any:
        number = [jax.pure_callback(held, jax.ShapeDtypeStruct((), a.dtype), 0) for a in every]
        return tuple(jnp.broadcast_to(n, a.shape) for n, a in zip(number, every, strict=True))

    y, x = lax.cond((jnp.abs(y) > 1e3).any(), wrong, lambda *every: every, y, x)
    return jnp.sin(y) + x


@jax.custom_jvp
def harmonics(x: Any) -> Any:
    """Return spherical harmonics as e3nn does: of degree 0, which is constant, and of degree 1."""
    return jnp.ones((len(x), 1)), jnp.sin(x)


@harmonics.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    one, y = harmonics(x)
    return (one, y), (jnp.zeros_like(one), lax.dot_general(dx * jnp.cos(x), one, (((), ()), ((0,), (0,))))[..., 0])


@jax.custom_vjp
def scaled(x: Any, scale: Any) -> Any:
    return jnp.sin(x) * scale


def _scaled_back(kept: Any, g: Any) -> Any:
    """Raise an error on the host, as Diffrax does."""
    x, scale = kept
    wrong = lambda s: jax.pure_callback(held, jax.ShapeDtypeStruct((), s.dtype), s)  # noqa: E731
    scale = lax.cond(scale > 1e3, wrong, lambda s: s, scale)
    return g * jnp.cos(x) * scale, jnp.zeros_like(scale)


scaled.defvjp(lambda x, scale: (scaled(x, scale), (x, scale)), _scaled_back)


def on_host(w: Any, x: Any) -> Any:
    return scaled(x @ w, lax.stop_gradient(w[0, 0]))


@pytest.mark.parametrize("rows", [phantom, implicit, checked, solved, handed, on_host])
def test_rows_are_divided(rows: Any) -> None:
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s) * 0.1, jnp.float32) for s in ((16, 16), (64, 16)))

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(rows(w, x) ** 2)

    assert not unparallelized(capture(loss, w, x).graph)
    plan = unity.optimize(loss, w, x, machine=SLOW, rules=(), progress=False)
    assert plan.in_shardings[1].shard_shape(x.shape)[0] < len(x)
    assert not [node for node in plan.program.pcg.nodes if node.kind == "combine"]
    found, wanted = (jax.jit(jax.value_and_grad(f))(*a) for f, a in ((plan, plan.shard(w, x)), (loss, (w, x))))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found, wanted)


def test_agreements_are_counted() -> None:
    plan = unity.optimize(
        lambda w, x: fixed(w, x)[0], *(jnp.ones(s) for s in ((16, 16), (64, 16))), machine=SLOW, training=False, progress=False
    )
    (agreed,) = (c for c in traffic(plan.program.pcg) if c.kind == "all-reduce")
    assert (agreed.elements, agreed.itemsize) == (1, 1)


@jax.custom_vjp
def converged(w: Any, x: Any) -> Any:
    return fixed(w, x)[0]


def _converged_back(kept: Any, g: Any) -> Any:
    """Take as many steps backward as all rows need, on which devices agree again."""
    w, z, _ = kept
    slope = 1 - z**2

    def step(carry: Any) -> Any:
        u, _, count = carry
        new = g + (u * slope) @ w.T
        return new, jnp.abs(new - u).max(1), count + 1

    u, _, _ = lax.while_loop(lambda c: (c[2] < 50) & ~jnp.all(c[1] < 1e-7), step, (g, jnp.full(len(g), jnp.inf), 0))
    u = u * slope
    return z.T @ u, u


converged.defvjp(_forward, _converged_back)


def stepped(w: Any, x: Any) -> Any:
    """Take steps on which devices agree, inside a scan of known length."""

    def inner(z: Any, _: Any) -> Any:
        return lax.cond(jnp.all(jnp.abs(z) < 1e-6), lambda z: z, lambda z: jnp.tanh(z @ w + x), z), None

    def outer(z: Any, _: Any) -> Any:
        again = lambda z: lax.scan(inner, z, length=3)[0]  # noqa: E731
        return lax.cond(jnp.all(jnp.abs(z) < 1e-6), lambda z: z, again, z), None

    return lax.scan(jax.checkpoint(outer), x, length=5)[0]


@pytest.mark.parametrize("rows", [implicit, converged, stepped])
def test_predicted_agreements_are_sent(rows: Any) -> None:
    """Agreements are counted in backward rules, in every step of a scan, and again where a remat recomputes them."""
    w, x = (jnp.full(s, 0.01) for s in ((16, 16), (64, 16)))
    plan = unity.optimize(lambda w, x: jnp.mean(rows(w, x) ** 2), w, x, machine=SLOW, rules=(), progress=False)
    assert plan.in_shardings[1].shard_shape(x.shape)[0] < len(x)
    (line,) = (line for line in plan.check().lines if line.kind == "all-reduce")
    assert line.predicted == line.compiled


def test_a_result_without_operands_has_the_state_that_its_rule_gives() -> None:
    body = close(jax.make_jaxpr(harmonics)(jnp.ones((64, 16))))
    (rows,) = (c for c in choices(body) if c.operands == (partitioned(0),))
    assert rows.results == (partitioned(0), partitioned(0))
