"""Residuals of a custom_vjp that depend on none of its operands."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from test_agreed import SLOW

import unity
from unity.search.cost.prediction import predict

sine = jax.custom_vjp(lambda x: jnp.sin(x))
sine.defvjp(
    lambda x: (jnp.sin(x), (x, jnp.broadcast_to(jnp.arange(x.shape[1]) > 2, x.shape))),
    lambda residuals, g: (jnp.where(residuals[1], g * jnp.cos(residuals[0]), 0),),
)


def test_a_rule_with_a_constant_mask_is_divided() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(sine(x @ w) ** 2)

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 8), (64, 8)))
    plan = unity.optimize(loss, w, x, machine=SLOW, rules=(), progress=False)
    prediction = predict(plan.program.pcg, plan.inspect.machine, plan.program.family.differentiated)
    assert [t.share < 1 for t in prediction.operators if t.node.kind == "custom_vjp"] == [True]
    actual = jax.jit(jax.value_and_grad(plan))(*plan.shard(w, x))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, jax.value_and_grad(loss)(w, x))
    assert plan.check().agrees()
