"""Exports of loops that run whole: they hold what JAX wrote of the user's own program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from precision import in_64_bits
from small_models import arrays, f
from test_export import assert_agrees, assert_well_written
from test_programs import planned


def written_at_the_counter(c: Any) -> Any:
    """A counter that began as a Python number is converted to its own dtype where JAX wraps it."""
    t, x = c
    return t + 1, lax.dynamic_update_slice(x, x[:1] @ x, (t, 0))


def placed(c: Any) -> Any:
    t, x = c
    return t + 1, jnp.tanh(jax.device_put(x) @ x)


@pytest.mark.parametrize("step", [written_at_the_counter, placed])
def test_a_replicated_loop_is_exported(step: Any, tmp_path: Path) -> None:
    def loss(w: Any, x: Any) -> Any:
        looped = lax.while_loop(lambda c: (c[0] < 5) & (c[1][0, 0] < 9), step, (0, lax.stop_gradient(x)))[1]
        return jnp.mean((x @ w + looped) ** 2)

    with in_64_bits():
        shapes = f(16, 16), f(16, 16)
        plan = planned(loss, *shapes)[0]
        plan.files.export(path := tmp_path / "plan.py")
        assert_well_written(path)
        assert_agrees(plan, path, *arrays(shapes))


def test_a_loop_that_only_repeats_is_exported(tmp_path: Path) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(lambda *_: (None, jnp.sort(w, 1)), None, None, length=3)[1] @ x)

    shapes = f(16, 16), f(16, 16)
    plan = planned(loss, *shapes)[0]
    plan.files.export(path := tmp_path / "plan.py")
    assert_well_written(path)
    assert_agrees(plan, path, *arrays(shapes))
