"""Cotangents with one constant in every element are not gathered: predicted and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rerun_models import drawn, enter, right
from small_models import Small, f

import unity
from unity.pcg.parallel.traffic import Collective, traffic

LINEAR: dict[str, Callable[..., Any]] = {
    "mean of a product": lambda w, x: (x @ w).mean(),
    "multiples of sums": lambda w, x: -(jnp.tanh(x) @ w).T.mean(0).sum() * 3,
    "real part": lambda w, x: jnp.real((x + 1j) @ (w * (2 + 1j))).mean(),
    "imaginary part": lambda w, x: jnp.imag((x + 1j) @ (w * (2 + 1j))).mean(),
    "sum of two sums": lambda w, x: ((x @ w[:, :3]).sum() + (x @ w).mean()) / 2 - x.sum(),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "square of a sum": lambda w, x: ((x @ w).sum() / 7) ** 2,
    "weighted sum": lambda w, x: ((x @ w) * x[:, :6]).mean(),
    "sum with weights of the program": lambda w, x: ((x @ w).sum(0) * jnp.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])).sum(),
    "quotient": lambda w, x: (3 / jnp.exp(x @ w)).sum(),
}


def model(loss: Callable[..., Any]) -> Callable[[], Small]:
    return lambda: Small(loss, f(8, 6), f(8, 8))


enter({name: model(loss) for name, loss in (LINEAR | OTHERS).items()})


def constant(name: str, seed: int) -> list[Collective]:
    """The predicted gathers of constant cotangents in a plan."""
    captured, _, _, graph = drawn(name, seed)
    return [c for c in traffic(graph, captured.differentiated) if c.folded]


@pytest.mark.parametrize("name", LINEAR)
def test_plans_do_not_gather_the_cotangents_of_a_linear_loss(name: str) -> None:
    """Nor do they leave out a gather of one that some devices hold as zeros."""
    seeds = [seed for seed in range(40) if constant(name, seed)]
    assert seeds
    right(name, [*seeds[:3], 8, 13])


@pytest.mark.parametrize("name", OTHERS)
def test_cotangents_of_other_losses_are_data(name: str) -> None:
    assert not any(constant(name, seed) for seed in range(40))


def test_a_check_of_a_linear_loss_agrees() -> None:
    device = unity.Device("slow", {"float32": 1e6}, 10**9, 1e6, 1.0, 0.0)
    machine = unity.Machine.grid(2, 4, device, intra=(1e12, 1e-12), inter=(1e12, 1e-12))
    args = jax.ShapeDtypeStruct((8, 6), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plan = unity.optimize(lambda w, x: (x @ w).mean(), *args, machine=machine, search="captured", progress=False)
    assert plan.check().deviations == ()
