"""A model that forks, joins, and goes on through equal layers: two towers of other depths, what they make, and a loss.

Its branches and its layers may be in one plan: on groups of devices, and in stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import unity
from benchmarks.descent import step_of

SHAPES = {
    "u1": (24, 32), "u2": (32, 8), "v1": (40, 16), "v2": (16, 48), "v3": (48, 8), "layers": (4, 16, 16), "out": (16, 4),
}  # fmt: skip
ROWS = 32


def loss(params: Any, batch: Any) -> Any:
    u = jax.nn.relu(batch["users"] @ params["u1"]) @ params["u2"]
    v = jnp.tanh(jax.nn.relu(batch["items"] @ params["v1"]) @ params["v2"]) @ params["v3"]
    both = jnp.concatenate([u, v], -1)
    found = lax.scan(lambda c, w: (c + jnp.tanh(c @ w), None), both, params["layers"])[0]
    return ((found @ params["out"] - batch["target"]) ** 2).mean()


def weights(dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(0)
    return {name: (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(dtype) for name, shape in SHAPES.items()}


def batch(seed: int = 1, dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(ROWS, n)).astype(dtype) for name, n in (("users", 24), ("items", 40), ("target", 4))}


def planned(machine: unity.Machine, dtype: Any = np.float32, **options: Any) -> unity.Plan:
    """A plan, with branches on two groups of devices and a pipeline of two stages if nothing else is said."""
    groups, pipeline = None if "branches" in options else 2, None if "pipelines" in options else unity.PipelineShape(2, 4)
    asked = {"branch_groups": groups, "pipeline": pipeline, "search": "captured", **options}
    return unity.optimize(loss, weights(dtype), batch(dtype=dtype), machine=machine, progress=False, **asked)


def losses(fn: Callable[..., Any], params: Any, place: Callable[[Any], Any], steps: int) -> tuple[list[float], Any]:
    """The losses of some steps of gradient descent, on other samples in every step, and the weights after them."""
    step, found = step_of(fn, 0.1), []
    for k in range(steps):
        params, value = step(params, place(batch(k, jax.tree.leaves(params)[0].dtype)))
        found.append(float(value))
    return found, params
