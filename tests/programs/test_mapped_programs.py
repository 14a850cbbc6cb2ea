"""Losses with a `shard_map` inside are planned as global programs: values and gradients stay, nothing of size runs whole."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from mapped_programs import DEVICES, IDIOMS

import unity


@pytest.mark.parametrize("name", IDIOMS)
def test_plans_of_idioms_compute_what_was_written(name: str, own_cache: Path) -> None:
    idiom = IDIOMS[name]()
    arguments, numbers = idiom.arguments(), tuple(range(idiom.weights))
    machine = unity.Machine.grid(1, DEVICES, "a100")
    plan = unity.optimize(idiom.loss, *arguments, argnums=numbers, machine=machine, budget=0, progress=False)
    value, gradients = jax.jit(jax.value_and_grad(plan, numbers))(*plan.shard(*arguments))
    expected, expected_gradients = jax.jit(jax.value_and_grad(idiom.loss, numbers))(*arguments)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for x, y in zip(gradients, expected_gradients, strict=True):
        y = np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5 * np.abs(y).max())
