"""A model with random masks: Unity's plan against data parallelism that is written by hand, on eight virtual CPU devices.

`python -m benchmarks.dropout`. Random bits are a good part of such a step on a CPU. With the shardings of `jax.jit` a device draws
its own part of every mask, and so must a plan's. Both draw the same masks, so losses are compared too.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import unity
from benchmarks.alternate import alternate, ratio
from benchmarks.baselines import mesh_of
from benchmarks.record import record, show
from unity.exec.compiled.hlo import memory
from unity.exec.planned_step import compiler_options

DEVICES, LAYERS, WIDTH, RATE = 8, 4, 256, 0.1


def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    """Residual layers that widen four times, with a mask on what is wide."""
    for k, (up, down) in enumerate(params):
        h = jax.nn.gelu(x @ up)
        kept = jax.random.bernoulli(jax.random.fold_in(key, k), 1 - RATE, h.shape)
        x = x + jnp.where(kept, h / (1 - RATE), 0.0) @ down
    return jnp.mean(x**2)


def arguments(batch: int) -> tuple[Any, np.ndarray, jax.Array]:
    """Weights, a batch `[batch, WIDTH]`, and a key."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * shape[0] ** -0.5).astype(np.float32)

    params = [(drawn(WIDTH, 4 * WIDTH), drawn(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    return params, drawn(batch, WIDTH), jax.random.key(0)


def row(batch: int, rounds: int) -> dict[str, Any]:
    """One comparison."""
    args, mesh = arguments(batch), mesh_of(DEVICES)
    plan = unity.optimize(loss, *args, machine=unity.Machine.local(), progress=False)
    whole, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    by_hand = tuple(jax.device_put(a, s) for a, s in zip(args, (whole, cut, whole), strict=True))
    placed = {"unity": plan.shard(*args), "by hand": by_hand}
    steps = {"unity": jax.jit(jax.value_and_grad(plan)), "by hand": jax.jit(jax.value_and_grad(loss), out_shardings=whole)}
    compiled = {name: step.lower(*placed[name]).compile(compiler_options=compiler_options()) for name, step in steps.items()}
    losses = {name: float(step(*placed[name])[0]) for name, step in compiled.items()}
    assert np.isclose(losses["unity"], losses["by hand"], rtol=1e-5), losses
    times = alternate({name: lambda name=name: compiled[name](*placed[name]) for name in compiled}, rounds)
    held = {name: memory(step).total for name, step in compiled.items()}
    figures = {f"{name} ms": times[name].median * 1e3 for name in times} | {f"{name} MB": held[name] / 1e6 for name in held}
    compared = {f"time {k}": v for k, v in ratio(times["unity"], times["by hand"]).items()}
    return {"batch": batch, **figures, **compared, "memory ratio": held["unity"] / held["by hand"]}


def main(rounds: int = 15) -> None:
    rows = [row(batch, rounds) for batch in (1024, 4096)]
    show("residual layers with dropout, unity / data parallel by hand", rows)
    record("dropout", rows)


if __name__ == "__main__":
    main()
