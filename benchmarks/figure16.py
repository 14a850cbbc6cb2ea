"""Why algebra and parallelization are one problem: Unity's examples (figures 2, 16a and 16b), and what is lost if they are two.

`python -m benchmarks.figure16`. "sequential" rewrites a program for one device, and parallelizes what comes out, by the same exact
search: there it may do all that "joint" may, but for changing the program. In the paper it may do less: "fused" is that, as
`benchmarks.fused` restricts the sequential candidate. Seconds are predicted ones of a step. Nothing is run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

import unity
from benchmarks.fused import Restricted, algebra_first
from benchmarks.record import asked, record, show
from unity.machine.hardware import Device
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.parallel.traffic import traffic
from unity.search.cost.cost import Training


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params[:-1]:
        x = jax.nn.relu(x @ w)
    return jnp.sum(x @ params[-1])


def looked_up(params: dict[str, Any], ids: jax.Array, y: jax.Array) -> jax.Array:
    rows = [table[ids[:, k]] for k, table in enumerate(params["tables"])]
    hidden = jax.nn.relu(jnp.concatenate(rows, axis=1) @ params["in"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def slow_link() -> Machine:
    """Two devices so slow that both are worth it, on a link where bytes count and messages do not."""
    slow = Device("slow", {"float32": 1e9}, 10**9, 1e12, 1.0, 0.0)
    return Machine.grid(1, 2, slow, intra=(1e9, 0.0), inter=(1e9, 0.0))


def roomy(machine: Machine) -> Machine:
    """Memory is not what is compared."""
    return replace(machine, device=replace(machine.device, memory=10**15))


@dataclass(frozen=True)
class Case:
    """An example: a function of arguments on a machine."""

    fn: Callable[..., jax.Array]
    args: tuple[Any, ...]
    machine: Machine


def cases() -> dict[str, Case]:
    ids = jax.ShapeDtypeStruct((8192, 8), jnp.int32)
    tables = {"tables": [f32(1_000_000, 64)] * 8, "in": f32(512, 256), "out": f32(256, 1)}
    wide = [f32(8192, 8192) for _ in range(4)]
    return {
        "2: two layers, b 64, h 512, ci 784, co 10, 2 devices": Case(
            mlp, ([f32(784, 512), f32(512, 10)], f32(64, 784)), slow_link()
        ),
        "16a: four layers of 8192, b 64, 8 V100": Case(mlp, (wide, f32(64, 8192)), roomy(Machine.grid(1, 8, "v100"))),
        "16a: four layers of 8192, b 64, 16 x 6 V100": Case(mlp, (wide, f32(64, 8192)), roomy(Machine.grid(16, 6, "v100"))),
        "16b: eight tables joined, 8 V100": Case(looked_up, (tables, ids, f32(8192, 1)), roomy(Machine.grid(1, 8, "v100"))),
    }


ROUNDS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}


def sent(graph: PCG, machine: Machine, differentiated: Collection[int]) -> int:
    """Elements that all devices together send in one step, by rings, as the paper counts them."""
    total = 0
    for c in traffic(graph, differentiated):
        n = prod(machine.axes[k].size for k in c.axes)
        total += ROUNDS[c.kind] * (n - 1) * c.elements * c.count * (machine.devices // n)
    return total


def measured(name: str) -> dict[str, Any]:
    case, training = cases()[name], Training()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        options = {"machine": case.machine, "pipelines": False, "branches": False, "progress": False}
        searches = ("data-parallel", "sequential", "unity")
        data, sequential, joint = (unity.optimize(case.fn, *case.args, search=s, **options) for s in searches)
    after = algebra_first(capture(case.fn, *case.args), case.machine, training)
    restricted = Restricted(after, case.machine, training)
    fused = restricted.search.fastest
    graphs = {"data parallel": data.program.pcg, "fused": parallelize(after.graph, fused.assignment), "joint": joint.program.pcg}
    return {
        "case": name,
        "operators restricted": restricted.operators,
        "data parallel ms": data.time * 1e3,
        "fused ms": fused.time * 1e3,
        "sequential ms": sequential.time * 1e3,
        "joint ms": joint.time * 1e3,
        "fused / joint": fused.time / joint.time,
        "sequential / joint": sequential.time / joint.time,
        **{f"{k}: elements sent": sent(g, case.machine, after.differentiated) for k, g in graphs.items()},
    }


def main() -> None:
    chosen, every = asked(__doc__, cases())
    rows = []
    for name in chosen:
        rows.append(measured(name))
        show(name, rows[-1:])
    if every:
        record("figure16", rows)


if __name__ == "__main__":
    main()
