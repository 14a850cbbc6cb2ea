"""Clustering is for speed: equations as operators of their own have no faster plan than the operators that they are joined to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ci_cases import CI
from clustered_times import FAST_MEMORY, MACHINE, clustered_and_separate
from random_networks import RandomNetwork


@pytest.mark.parametrize("first", range(0, 100 if CI else 200, 20))
def test_separate_equations_have_no_faster_plan(first: int) -> None:
    for seed in range(first, first + (8 if CI else 20)):
        (ratio,) = clustered_and_separate(RandomNetwork(seed), MACHINE)
        assert ratio <= 1.01, f"network {seed}: {ratio:.3f} times as long"


class ScaledGate:
    """A gate of two products, scaled by the means of a third one's rows, which reads the same columns."""

    @property
    def arguments(self) -> tuple[tuple[jax.ShapeDtypeStruct, ...], jax.ShapeDtypeStruct]:
        """The shapes of the weights and of the input."""
        return (jax.ShapeDtypeStruct((4096, 16384), jnp.float32),) * 3, jax.ShapeDtypeStruct((16384, 4096), jnp.float32)

    def __call__(self, weights: Any, *inputs: Any) -> Any:
        (x,) = inputs
        left, right, other = (x @ w for w in weights)
        return jnp.mean((jax.nn.relu(jnp.tanh(left) * right) * other.mean(-1, keepdims=True)) ** 2)


def test_a_row_statistic_that_scales_a_gate_is_reduced_inside() -> None:
    assert max(clustered_and_separate(ScaledGate(), MACHINE, FAST_MEMORY)) <= 1.01
