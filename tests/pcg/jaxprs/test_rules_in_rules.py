"""Calls with rules inside of derivative rules become plain calls, which JAX may prune and differentiate like any other."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from unity.pcg.jaxprs.foreign_primitives import first_order

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def reduced(x: Any, axis: int = 0) -> Any:
    return jax.nn.logsumexp(x, axis), jnp.sum(x)


reduced.defjvp(lambda axis, primals, tangents: jax.jvp(lambda x: (jax.nn.logsumexp(x, axis), jnp.sum(x)), primals, tangents))


def rows(x: Any) -> Any:
    """Use one result of a call whose argument `axis` is static, in a branch and in a loop."""

    def step(x: Any, _: Any) -> Any:
        return x + 1, lax.cond(x.sum() > 0, lambda x: reduced(x, axis=1), lambda x: reduced(-x, axis=1), x)

    return lax.scan(step, x, None, length=2)


@pytest.mark.parametrize("change", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_a_replaced_call_is_pruned(change: Callable) -> None:
    run = core.jaxpr_as_fun(first_order(jax.make_jaxpr(rows)(X)))
    loss = change(lambda x: run(x)[2].sum())
    wanted = jax.value_and_grad(lambda x: rows(x)[1][1].sum())(X)
    np.testing.assert_allclose(loss(X), wanted[0], rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), jax.value_and_grad(loss)(X), wanted)
