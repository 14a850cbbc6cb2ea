"""Gradients of arguments that a plan was not made to differentiate: right, or refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unity

MACHINE = unity.Machine.grid(2, 4, "a100")


def loss(p: Any, q: Any, x: Any, y: Any, s: Any) -> Any:
    return ((jnp.tanh(x @ p) * jnp.sin(s) @ jnp.tanh(q) - y) ** 2).mean()


def arguments() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s)) for s in ((16, 16), (16, 8), (64, 16), (64, 8), ())]


@pytest.mark.parametrize(
    ("option", "left_out"), [({"micro_batches": 4}, {1, 4}), ({"pipeline": unity.PipelineShape(2, 4)}, {2, 3})]
)
def test_gradients_that_a_plan_leaves_out_are_refused_and_never_zero(option: dict[str, Any], left_out: set[int]) -> None:
    with jax.enable_x64(True):
        args = arguments()
        plan = unity.optimize(loss, *args, machine=MACHINE, progress=False, budget=0, **option)
        for k in range(5):
            if k in left_out:
                with pytest.raises(unity.PlanError, match=rf"args\[{k}\] is differentiated, but the plan was made"):
                    jax.jit(jax.grad(plan, k))(*args)
            else:
                wanted = jax.grad(loss, k)(*args)
                np.testing.assert_allclose(jax.jit(jax.grad(plan, k))(*args), wanted, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(plan(*args), loss(*args), rtol=1e-12)


def test_they_are_right_where_they_are_planned() -> None:
    with jax.enable_x64(True):
        args, every = arguments(), (0, 1, 4)
        plan = unity.optimize(loss, *args, argnums=every, machine=MACHINE, progress=False, budget=0, micro_batches=4)
        found, wanted = (jax.jit(jax.grad(f, every))(*args) for f in (plan, loss))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, wanted)
