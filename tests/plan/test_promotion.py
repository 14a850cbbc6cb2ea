"""Plans where the user forbids that operands of different ranks or types are combined, as large code bases do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import unity

DEVICE = unity.Device("slow", {"float32": 1e6}, 10**9, 1e9, 0.5, 0.0)  # so that all that can be is divided
MACHINE = replace(unity.Machine.grid(2, 2), device=DEVICE)


@pytest.fixture(autouse=True)
def _without_promotion() -> Iterator[None]:
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def dropout(w: jax.Array, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ w)
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, h.shape)
    return jnp.square(jnp.where(kept, h, jnp.zeros_like(h))).mean()


def groups(w: jax.Array, x: jax.Array) -> jax.Array:
    sizes = jnp.array([3, 1, 0, 4], jnp.uint8)
    return lax.ragged_dot(x, jnp.tanh(jnp.stack([w, w, w, w])), sizes).mean()


def penalty(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(jax.vmap(jax.grad(lambda row: jnp.tanh(row @ w).sum()))(x)).mean()


@pytest.mark.parametrize("fn", [dropout, groups, penalty])
def test_a_plan_is_made_run_and_exported_without_promotion(fn: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 8), (8, 8)))
    plan = unity.optimize(fn, w, x, machine=MACHINE, budget=2, progress=False)
    for one in (plan, plan.frontier[-1]):
        np.testing.assert_allclose(jax.jit(jax.grad(one))(w, x), jax.grad(fn)(w, x), rtol=1e-5, atol=1e-6)
    plan.files.export(tmp_path / "exported.py")


def test_a_step_with_results_of_several_types_is_checked() -> None:
    """Its gradients are those of the sum of all results."""

    def narrow_and_wide(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(w).astype(jnp.float8_e4m3fn), jnp.square(x @ w).mean()

    args = jnp.ones((8, 4)), jnp.ones((16, 8))
    assert unity.optimize(narrow_and_wide, *args, machine=MACHINE, progress=False, search="captured").check()
