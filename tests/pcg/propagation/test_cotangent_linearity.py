"""Which derivative rules are linear in their cotangent: those for which twice the cotangent gives twice the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unity.pcg.capture.capture import capture
from unity.pcg.propagation.cotangent_linearity import nonlinear_call

Rule = Callable[[Any, Any], Any]

LINEAR: dict[str, Rule] = {
    "itself": lambda x, g: g,
    "zeros": lambda x, g: jnp.zeros_like(x),
    "reversed": lambda x, g: -0.1 * g,
    "of tanh": lambda x, g: g * (1 - jnp.tanh(x) ** 2),
    "masked": lambda x, g: jnp.where(x > 0, g, 0.0),
    "of softmax": lambda x, g: jax.nn.softmax(x) * (g - jnp.sum(g * jax.nn.softmax(x), -1, keepdims=True)),
    "products": lambda x, g: jnp.einsum("ij,kj,kl->il", g, x, x),
    "products of bfloat16": lambda x, g: (g.astype(jnp.bfloat16) @ jnp.ones((16, 16), jnp.bfloat16)).astype(x.dtype),
    "in bfloat16": lambda x, g: g.astype(jnp.bfloat16).astype(x.dtype),
    "in a jit": lambda x, g: jax.jit(lambda g: 2 * g + g @ jnp.eye(g.shape[1]))(g),
    "a scan": lambda x, g: lax.scan(lambda c, g: (0.5 * c + g, c), jnp.zeros(g.shape[1:]), g)[1],
    "a branch by a value": lambda x, g: lax.cond(x.sum() > 0, lambda g: g, lambda g: 2 * g, g),
    "joined with zeros": lambda x, g: jnp.concatenate([g[:4], jnp.zeros_like(g[4:])]),
    "of attention": lambda x, g: jax.vjp(lambda y: jax.nn.softmax(y @ y.T) @ y, x)[1](g)[0],
}
NONLINEAR: dict[str, Rule] = {
    "clipped": lambda x, g: jnp.clip(g, -0.01, 0.01),
    "normed": lambda x, g: g / (1e-6 + jnp.linalg.norm(g)),
    "signs": lambda x, g: jnp.sign(g),
    "a term beside it": lambda x, g: g + 1e-3 * x,
    "another value where masked": lambda x, g: jnp.where(x > 0, g, 1.0),
    "squared": lambda x, g: g * g,
    "of an auxiliary loss, whatever the cotangent": lambda x, g: jnp.ones_like(x),
    "in a jit": lambda x, g: jax.jit(lambda g: jnp.clip(g, -1, 1))(g),
    "a branch by the cotangent": lambda x, g: lax.cond(g.sum() > 0, lambda g: g, lambda g: 2 * g, g),
    "a product of steps": lambda x, g: lax.scan(lambda c, g: (c * g, c), jnp.ones(g.shape[1:]), g)[1],
}


def ruled(rule: Rule) -> Callable[[Any], Any]:
    call = jax.custom_vjp(lambda x: jnp.tanh(x))
    call.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (rule(x, g),))
    return call


def nonlinear_in(call: Callable[[Any], Any]) -> Any:
    weight, batch = (jax.ShapeDtypeStruct((n, 16), jnp.float32) for n in (16, 8))
    return nonlinear_call(capture(lambda w, x: jnp.mean(call(x @ w) ** 2), weight, batch).body)


@pytest.mark.parametrize("name", LINEAR)
def test_linear_rules(name: str) -> None:
    assert nonlinear_in(ruled(LINEAR[name])) is None
    x, g = (np.random.default_rng(k).normal(size=(8, 16)).astype(np.float32) for k in range(2))
    np.testing.assert_allclose(LINEAR[name](x, 2 * g), 2 * np.asarray(LINEAR[name](x, g)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NONLINEAR)
def test_rules_that_are_not_linear(name: str) -> None:
    call = nonlinear_in(ruled(NONLINEAR[name]))
    assert call is not None
    assert call.name == "custom_vjp_call"


def test_a_rule_in_a_step_of_a_loop() -> None:
    clipped = ruled(NONLINEAR["clipped"])
    assert nonlinear_in(lambda x: lax.scan(lambda c, x: (clipped(c + x), None), x[0], x)[0]) is not None
