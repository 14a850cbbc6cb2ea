"""What each of several processes runs for tests/transforms/pipelining/test_pipelines_2bw_hosts.py: `pipelined_worker.py ADDRESS
PROCESSES PROCESS`.

Some steps by 2BW, in float64, and the same on one device. Prints what happened as JSON, in its last line.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from pipelined_models import loss

import unity
from benchmarks.processes import join
from unity.plan.stream import Stream

WIDTH, LAYERS, ROWS, STEPS = 64, 4, 16, 5


def weights() -> Any:
    rng, shapes = np.random.default_rng(0), {"in": (WIDTH, WIDTH), "layers": (LAYERS, WIDTH, WIDTH), "out": (WIDTH, 3)}
    return {name: rng.normal(size=shape) / 8 for name, shape in shapes.items()}


def batch(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(ROWS, n)) for n in (WIDTH, 3))


def applied(params: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)


def together(plan: unity.Plan) -> tuple[list[float], Any]:
    """Losses, and the weights in the end; of every batch a process has its own rows."""

    def local(seed: int) -> Any:
        rows, first = ROWS // jax.process_count(), jax.process_index() * ROWS // jax.process_count()
        return [plan.shard.local(x[first : first + rows], argument=1 + k) for k, x in enumerate(batch(seed))]

    stream = Stream(plan)
    step, update, params, losses = jax.jit(stream.step), jax.jit(applied), plan.shard(weights()), list[float]()
    flight = stream.start(params, *local(0))
    for k in range(1, STEPS):
        flight, (value, gradients) = step(flight, params, *local(k))
        params, losses = update(params, gradients), [*losses, float(value)]
    value, gradients = stream.finish(flight)
    return [*losses, float(value)], update(params, gradients)


def alone() -> tuple[list[float], Any]:
    """The same: w(t + 1) = w(t) - lr * gradient(w(t - 1), batch t - 1)."""
    step, params = jax.jit(jax.value_and_grad(loss)), weights()
    before, losses = params, list[float]()
    for k in range(STEPS):
        value, gradients = step(before, *batch(k))
        before, params, losses = params, applied(params, gradients), [*losses, float(value)]
    return losses, params


def main() -> None:
    join()
    jax.config.update("jax_enable_x64", True)
    device = unity.Device("slow", {"float32": 1e7, "float64": 1e7}, 2**30, 1e7, 1.0, 0.0)
    links: dict[str, Any] = {"intra": (1e9, 1e-7), "inter": (1e6, 1e-7)}
    machine = unity.Machine.grid(jax.process_count(), jax.local_device_count(), device, **links)
    plan = unity.optimize(
        loss, weights(), *batch(0), machine=machine, progress=False, search="captured", pipeline=unity.PipelineShape(2, 4, "2bw")
    )
    losses, params = together(plan)
    wanted, after = alone()
    found = jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), params)
    gaps = jax.tree.map(lambda x, y: float(np.abs(np.asarray(x) - np.asarray(y)).max()), found, after)
    agrees = plan.check().agrees()
    said = {"together": losses, "alone": wanted, "weights": max(jax.tree.leaves(gaps)), "agrees": agrees}
    pipelining = plan.program.pipelining
    assert pipelining is not None
    print(json.dumps(said | {"pipelining": str(pipelining), "along": [axis.name for axis in pipelining.along]}))


if __name__ == "__main__":
    main()
