"""Values that JAX leaves undefined: `lax.empty`, and residuals of the branch that was not taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_held import arguments, planned

from unity.pcg.capture.capture import capture


def differentiated_branch(y: Any, w: Any) -> Any:
    """Return a conditional of which each branch leaves the residuals of the other undefined."""

    def one(y: Any) -> Any:
        return jnp.sum(jnp.sin(y) * jnp.cos(y))

    return jax.grad(lambda y: lax.cond(w[0, 0] > 0, one, lambda y: jnp.sum(y * y), y))(y)


def filled(y: Any, w: Any) -> Any:
    return jnp.empty_like(y).at[:, :8].set(y[:, :8]).at[:, 8:].set(jnp.sin(y[:, 8:]))


def looped(y: Any, w: Any) -> Any:
    return lax.fori_loop(0, 16, lambda k, c: c.at[:, k].set(jnp.sin(y[:, k])), lax.empty(y.shape, y.dtype))


def ranked(y: Any, w: Any) -> Any:
    return y * jax.vmap(jax.scipy.stats.rankdata)(y)


@pytest.mark.parametrize("fn", [differentiated_branch, filled, looped, ranked])
def test_rows_are_divided(fn: Callable[[Any, Any], Any]) -> None:
    loss, plan = planned(fn)
    w, x = arguments()
    assert plan.in_shardings[1].shard_shape(x.shape)[0] < len(x)
    found, wanted = (jax.jit(jax.value_and_grad(f))(*given) for f, given in ((plan, plan.shard(w, x)), (loss, (w, x))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "complex64", "bool"])
def test_it_is_zero(dtype: str) -> None:
    with jax.enable_x64(True):
        body = capture(lambda x: (x, lax.empty((2, 3), dtype)), jnp.ones(4)).body
    assert "empty" not in body.primitives
    assert body.tensor(body.outputs[1]).dtype == dtype
    assert body.primitives == ("broadcast_in_dim",)
