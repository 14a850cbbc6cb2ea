"""Loops whose steps return a constant as a carry, such as the zero of a cotangent that a step has used up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_agreed import SLOW

import unity
from unity.pcg.ir.program import close
from unity.pcg.propagation.choices import choices
from unity.pcg.types.parallel_type import REPLICATED, partitioned


def step(w: Any, total: Any, rest: Any) -> Any:
    return jnp.tanh(total @ w) + rest, jnp.zeros_like(rest)


def in_while(w: Any, x: Any) -> Any:
    def body(carry: Any) -> Any:
        return carry[0] + 1, *step(w, *carry[1:])

    return lax.while_loop(lambda carry: carry[0] < 3, body, (0, x, jnp.sin(x)))[1]


def in_scan(w: Any, x: Any) -> Any:
    return lax.scan(lambda carry, _: (step(w, *carry), None), (x, jnp.sin(x)), None, 3)[0][0]


@pytest.mark.parametrize("loop", [in_while, in_scan])
def test_a_carry_that_a_step_resets_is_divided(loop: Any) -> None:
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 8), (64, 8)))
    found = {c.operands: c.results for c in choices(close(jax.make_jaxpr(loop)(w, x)))}
    assert found[REPLICATED, partitioned(0)] == (partitioned(0),)
    plan = unity.optimize(loop, w, x, machine=SLOW, training=False, budget=0, progress=False)
    np.testing.assert_allclose(plan(*plan.shard(w, x)), loop(w, x), rtol=1e-5, atol=1e-6)
    assert plan.check().agrees()
