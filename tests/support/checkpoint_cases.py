"""A small training with an optimizer that has moments and counts, its plans on several machines, and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from optax_steps import optax_step

import unity

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 20)))


def loss(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["up"]["w"] + params["up"]["b"])
    both = hidden @ params["left"] + hidden @ params["right"]  # one product, after rewriting
    return ((both - batch["y"]) ** 2).mean()


def weights() -> Any:
    rng = np.random.default_rng(0)
    shapes = {"up": {"w": (16, 32), "b": (32,)}, "left": (32, 32), "right": (32, 32)}
    return jax.tree.map(lambda s: rng.normal(size=s).astype(np.float32), shapes, is_leaf=lambda s: isinstance(s, tuple))


def batch(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(64, 16)).astype(np.float32), "y": rng.normal(size=(64, 32)).astype(np.float32)}


def planned(nodes: int, devices: int, lean: bool = False, **options: Any) -> unity.Plan:
    """The fastest plan for these devices, or the one that needs least memory."""
    machine = unity.Machine.grid(nodes, devices, "a100")
    plan = unity.optimize(loss, weights(), batch(0), machine=machine, progress=False, **options)
    return plan.frontier[-1] if lean else plan


def started(plan: unity.Plan) -> tuple[Any, Any]:
    """Weights and the optimizer's state, placed for a plan."""
    params = plan.shard(weights())
    shardings = plan.shard.shardings(jax.eval_shape(OPTIMIZER.init, params))
    return params, jax.jit(OPTIMIZER.init, out_shardings=shardings)(params)


def step_of(fn: Callable[..., Any]) -> Callable[[Any, Any], tuple[Any, Any]]:
    return jax.jit(optax_step(fn, OPTIMIZER))


def saved(state: Any, path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def restored(plan: unity.Plan, path: Path) -> Any:
    """A checkpoint, as a plan wants it, whoever wrote it."""
    shapes = jax.eval_shape(lambda: (weights(), OPTIMIZER.init(weights())))
    wanted = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, plan.shard.shardings(shapes))
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, wanted)
