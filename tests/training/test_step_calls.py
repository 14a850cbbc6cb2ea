"""Random training steps: whatever is donated, passed on, given twice or no JAX array, values and types are those of `jax.jit`."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer

import unity

OPTIONS: dict[str, Any] = {"machine": unity.Machine.grid(1, 8, "a100"), "budget": 0, "progress": False}
KINDS = (jnp.copy, np.asarray, lambda x: x)  # of an argument; the last one is given twice if it is drawn twice


@unity.loss
def loss(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def random_step(draw: random.Random) -> Any:
    """A step of which each next value is updated, mixed, swapped, passed on or returned twice."""
    sources = [(draw.randrange(3), draw.randrange(3), draw.choice(("updated", "mixed", "same"))) for _ in range(3)]
    counted, extra = draw.random() < 0.5, draw.randrange(4)

    def step(state: Any, batch: Any) -> Any:
        weights, count = state
        gradients = jax.grad(loss)(weights, batch["x"])
        values = []
        for i, j, how in sources:
            updated = weights[i] - batch["rate"] * gradients[j]
            values.append({"updated": updated, "mixed": (weights[i] + weights[j]) / 2, "same": weights[i]}[how])
        others = (batch["x"], weights[0], count, gradients[1])
        return (values, count + 1 if counted else count), others[extra]

    return step


def random_arguments(draw: random.Random) -> Any:
    arrays = [jax.random.normal(jax.random.key(k), (16, 16)) / 4 for k in range(3)]
    take = lambda: draw.choice(KINDS)(arrays[draw.randrange(3)])  # noqa: E731
    weights, x = [take() for _ in range(3)], take()
    return (weights, draw.choice((0, np.int32(0), jnp.int32(0)))), {"x": x, "rate": draw.choice((0.1, jnp.float32(0.1)))}


def copies(tree: Any) -> Any:
    """The same tree in other memory, with arrays that occur twice."""
    memo: dict[int, Any] = {}
    return jax.tree.map(lambda x: memo.setdefault(id(x), jnp.copy(x) if isinstance(x, jax.Array) else x), tree)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("seed", range(fewer(10)))
def test_random_steps_compute_what_their_jit_does(seed: int) -> None:
    draw = random.Random(seed)
    step, (state, batch) = random_step(draw), random_arguments(draw)
    donated = draw.choice(((), (0,), (1,), (0, 1)))
    jitted = jax.jit(step)
    planned = unity.step(step, donate_argnums=donated, objective=draw.choice(("time", "memory")), **OPTIONS)
    planned.shardings(state, batch)  # planned apart from the call, whose arrays may be donated
    expected = state
    for _ in range(3):
        expected, value = jitted(expected, batch)
        args = state, copies(batch)
        if donated and repeated(args, donated):
            with pytest.raises(unity.PlanError, match=r"donates arrays .* twice:\n    args.* is also args") as caught:
                planned(*args)
            assert caught.value.link == "training#errors"
            args = planned.shard(*args)
        state, other = planned(*args)
        for one, two in zip(jax.tree.leaves((state, other)), jax.tree.leaves((expected, value)), strict=True):
            assert (one.dtype, one.weak_type) == (two.dtype, two.weak_type)
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
        kept = [x for k, arg in enumerate(args) if k not in donated for x in jax.tree.leaves(arg)]
        assert not any(isinstance(x, jax.Array) and x.is_deleted() for x in kept)


def repeated(args: Any, donated: Any) -> bool:
    """Whether an array that is donated is given twice."""
    arrays = [(x, k in donated) for k, arg in enumerate(args) for x in jax.tree.leaves(arg) if isinstance(x, jax.Array)]
    return any(x is y and (one or other) for (x, one), (y, other) in combinations(arrays, 2))
