"""In float32, plans differ from the function by no more than ten times what rounding its parameters does."""

from __future__ import annotations

import jax
import pytest
from ci_cases import by_hand
from small_models import MODELS, arrays

import unity
from benchmarks.numerics import allowed_for, cast, distances


@pytest.mark.parametrize("name", ["cnn", *by_hand("lstm")])
def test_float32_differs_by_rounding_alone(name: str) -> None:
    model = MODELS[name]()
    params, batch = (cast(arrays(tree), "float32") for tree in (model.params, model.batch))
    machine = unity.Machine.grid(1, 8, "a100")
    frontier = unity.optimize(model.loss, params, batch, machine=machine, progress=False).frontier
    step = jax.jit(jax.value_and_grad(model.loss))
    wanted = step(params, batch)
    loss, gradients = allowed_for(step, params, batch, wanted, "float32")
    assert 0 < gradients < 1e-3
    for point in (frontier[0], frontier[-1]):
        found = jax.jit(jax.value_and_grad(point))(*point.shard(params, batch))
        away = distances(found, wanted)
        assert away[0] <= loss
        assert away[1] <= gradients
