"""Optimizer state in finer pieces than the weights that are used (ZeRO-1 and 2): points of the search space, priced as such."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import unity
from unity.pcg.parallel.traffic import BACKWARD, FORWARD, traffic

MACHINE = unity.Machine.grid(1, 8, "a100")
LAYERS, WIDTH, SAMPLES = 4, 4096, 8192
WEIGHT = WIDTH * WIDTH * 4  # bytes


def loss(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def planned(search: str | None, slots: int, **options: Any) -> unity.Plan:
    args = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * LAYERS, jax.ShapeDtypeStruct((SAMPLES, WIDTH), "float32")
    kept = {} if search is None else {"search": search}
    return unity.optimize(loss, *args, machine=MACHINE, optimizer_slots=slots, budget=0, progress=False, **kept, **options)


def of_weights(plan: unity.Plan) -> list[tuple[str, str, int]]:
    """Return (direction, kind, bytes of the whole) of every collective of a weight or its gradient, once for every run."""
    every = [c for c in traffic(plan.program.pcg, range(LAYERS)) if c.elements == WIDTH * WIDTH]
    return sorted((c.direction, c.kind, c.elements * c.itemsize) for c in every for _ in range(c.count))


def test_divided_state_is_gathered_once_and_takes_the_time_of_data_parallelism() -> None:
    whole, divided = planned("data-parallel", 2), planned("fsdp", 2)
    assert of_weights(whole) == [(BACKWARD, "all-reduce", WEIGHT)] * LAYERS
    # The two halves of an all-reduce, before the update and after it; nothing is gathered again in the backward pass.
    assert of_weights(divided) == [(BACKWARD, "reduce-scatter", WEIGHT)] * LAYERS + [(FORWARD, "all-gather", WEIGHT)] * LAYERS
    assert divided.time == pytest.approx(whole.time, rel=0.06)  # more messages


def test_divided_state_takes_its_share_of_the_memory() -> None:
    def state(search: str) -> float:
        return planned(search, 2).memory - planned(search, 0).memory

    assert state("data-parallel") == 2 * LAYERS * WEIGHT
    assert state("fsdp") == 2 * LAYERS * WEIGHT / MACHINE.devices


def test_state_is_divided_where_it_does_not_fit() -> None:
    whole = planned("data-parallel", 2)
    plan = planned(None, 2, memory_limit=whole.memory - LAYERS * WEIGHT)
    assert plan.memory <= whole.memory - LAYERS * WEIGHT
    assert any(spec != jax.sharding.PartitionSpec() for spec in jax.tree.leaves(plan.in_specs[0]))
