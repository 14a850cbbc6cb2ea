"""Choices match the programs that run, which are derived from the types of operands and results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from unity.pcg.ir.program import close
from unity.pcg.propagation.choices import choices_with_moves
from unity.pcg.propagation.placement import placed


def averaged(state: Any, value: Any) -> Any:
    """Return the new state of an average without bias, and the average."""
    count, hidden = state
    hidden = hidden * 0.9 + value * 0.1
    return count + 1, hidden, hidden / (1 - 0.9 ** (count + 1))


def batch_norm(x: Any, mean_state: Any, variance_state: Any, scale: Any, offset: Any) -> Any:
    """Return the running mean and variance, and the normalized batch, as Haiku computes them."""
    mean = jnp.mean(x, 0, keepdims=True)
    variance = jnp.mean(x**2, 0, keepdims=True) - mean**2
    states = [averaged(state, value) for state, value in ((mean_state, mean), (variance_state, variance))]
    return states, jax.nn.relu((x - mean) * (scale * jax.lax.rsqrt(variance + 1e-5)) + offset)


@pytest.mark.parametrize("rows", [32, 1024])
def test_a_choice_follows_from_the_states_at_its_ends(rows: int) -> None:
    row = jnp.zeros((1, 64))
    state = jnp.int32(0), row
    body = close(jax.make_jaxpr(batch_norm)(jnp.zeros((rows, 64)), state, state, row, row))
    for choice in choices_with_moves(body, (), 2):
        solution = placed(body, choice.operands, choice.results)
        assert solution is None or solution.results == choice.results


def mean_of_products(x: Any, y: Any) -> Any:
    return (x * y).mean(0)


def sums_of_a_transpose(x: Any, y: Any) -> Any:
    return (x.T * y).sum(0).sum(0)


@pytest.mark.parametrize("fn", [mean_of_products, sums_of_a_transpose])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("side", [2, 64])
def test_a_choice_reduces_and_moves_what_runs(fn: Any, dtype: Any, side: int) -> None:
    """Where a waist could be moved but need not be, the operator runs without the move."""
    matrix = jnp.zeros((side, side), dtype)
    body = close(jax.make_jaxpr(fn)(matrix, matrix))
    for choice in choices_with_moves(body):
        solution = placed(body, choice.operands, choice.results)
        if solution is None or not solution.matches:
            continue
        assert {x.variable for x in choice.reduced} == solution.reduced.keys(), choice.name
        assert {x.variable for x in choice.scattered if x.moves} == {
            v for v, after in solution.scattered.items() if solution.states[v] != after and solution.states[v].kind == "P"
        }, choice.name
