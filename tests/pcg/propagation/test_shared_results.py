"""Batched calls of a `custom_vjp` with a result that is the same for the whole batch, such as the time of a solver's last step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_agreed import SLOW

import unity
from unity.base.errors import CaptureError
from unity.pcg.ir.program import close
from unity.pcg.propagation.choices import choices
from unity.pcg.propagation.nested.derivative_rules import Unreadable, vjp_bodies
from unity.pcg.types.parallel_type import REPLICATED, partitioned


@jax.custom_vjp
def solved(w: Any, x: Any, t: Any) -> Any:
    """Return the solution of one sample, and the time after the step."""
    return jnp.tanh(x @ w), t + 1


def _forward(w: Any, x: Any, t: Any) -> Any:
    return solved(w, x, t), (w, x)


def _backward(residuals: Any, cotangents: Any) -> Any:
    (w, x), (g, by_time) = residuals, cotangents
    g *= 1 - jnp.tanh(x @ w) ** 2
    return jnp.outer(x, g), w @ g, by_time


solved.defvjp(_forward, _backward)


def solutions(w: Any, x: Any) -> Any:
    return jax.vmap(solved, (None, 0, None), (0, None))(w, x, 2.0)


def loss(w: Any, x: Any) -> Any:
    y, end = solutions(w, x)
    return jnp.mean((y * lax.stop_gradient(end)) ** 2)


def timed(w: Any, x: Any) -> Any:
    y, end = solutions(w, x)
    return jnp.mean((y * end) ** 2)


def arguments() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((16, 24), (32, 16)))


def test_a_call_with_a_shared_result_divides_the_batch() -> None:
    body = close(jax.make_jaxpr(solutions)(*arguments()))
    found = {c.operands: c.results for c in choices(body)}
    assert found[REPLICATED, partitioned(0)] == (partitioned(0), REPLICATED)


@pytest.mark.parametrize("argnums", [(0,), (0, 1)])
def test_a_plan_of_a_call_with_a_shared_result_has_its_gradients(argnums: tuple[int, ...]) -> None:
    args = arguments()
    plan = unity.optimize(loss, *args, machine=SLOW, argnums=argnums, budget=0, progress=False)
    assert plan.in_shardings[1].shard_shape(args[1].shape) == (8, 16)
    actual = jax.jit(jax.value_and_grad(plan, argnums))(*plan.shard(*args))
    expected = jax.value_and_grad(loss, argnums)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)
    assert plan.check().agrees()


def test_a_gradient_to_a_shared_result_is_jaxs_or_refused_like_there() -> None:
    args = arguments()
    plan = unity.optimize(timed, *args, machine=SLOW, budget=0, progress=False)
    try:
        expected = jax.grad(timed)(*args)
    except ValueError:  # since JAX 0.12
        with pytest.raises(CaptureError, match="generic_batching"):
            jax.jit(jax.grad(plan))(*plan.shard(*args))
    else:
        np.testing.assert_allclose(jax.jit(jax.grad(plan))(*plan.shard(*args)), expected, rtol=1e-5, atol=1e-6)


def test_a_rule_that_cannot_be_traced_is_tried_once() -> None:
    @jax.custom_vjp
    def refusing(x: Any) -> Any:
        return x + 1

    def backward(residuals: Any, g: Any) -> Any:
        tries.append(g)
        raise ValueError("no gradient")

    tries: list[Any] = []
    refusing.defvjp(lambda x: (refusing(x), None), backward)
    (call,) = close(jax.make_jaxpr(refusing)(jnp.ones(8))).equations
    for _ in range(3):
        with pytest.raises(Unreadable, match="no gradient"):
            vjp_bodies(call)
    assert len(tries) <= 2
