"""Why algebra and parallelization are one problem: Unity's examples (figures 2, 16a and 16b), and what is lost if they are two.

`python -m benchmarks.figure16`. "sequential" rewrites a program for one device, and parallelizes what comes out, by the same exact
search: there it may do all that "joint" may, but for changing the program. In the paper it may do less: what an algebraic
optimizer has fused stays one operator, which is split as a whole or not at all. "fused" is that, as a restriction on the
sequential candidate, and it is ours: a product whose result goes into a function of elements has no partial sums, so its
contraction is not split; a join of looked-up rows is whole on every device that needs it. Seconds are predicted ones of a step.
Nothing is run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

import unity
from benchmarks.record import asked, record, show
from unity.pcg.capture import capture
from unity.pcg.graph import PCG, Node
from unity.pcg.parallelize import parallelize
from unity.pcg.state import PARTIAL
from unity.pcg.traffic import traffic
from unity.rewriting import Rewriter, budget_of
from unity.search.cost import Training
from unity.search.dimensions import Dimensions
from unity.search.hardware import Device
from unity.search.machine import Machine
from unity.search.masks import Along, Mask
from unity.search.pricing import Prices
from unity.search.session import Search
from unity.search.sites import Site


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


Choose = Callable[[Site, Mapping[int, list[Node]]], bool]


def product_before_elements(site: Site, users: Mapping[int, list[Node]]) -> bool:
    """Whether a site is a product whose result a function of elements takes."""
    node = site.node
    if node is None or node.body is None or "dot_general" not in node.body.primitives:
        return False
    return any(not {"max", "custom_jvp_call", "relu"}.isdisjoint((u.kind, *_first(u))) for u in users.get(id(node), []))


def _first(node: Node) -> tuple[str, ...]:
    return node.body.primitives if node.body is not None else ()


def join(site: Site, users: Mapping[int, list[Node]]) -> bool:
    """Whether a site joins rows that were looked up."""
    return site.node is not None and site.node.body is not None and "concatenate" in site.node.body.primitives


@dataclass(frozen=True)
class Case:
    """An example: a function of arguments on a machine, and which operators are fused where algebra comes first."""

    fn: Callable[..., jax.Array]
    args: tuple[Any, ...]
    machine: Machine
    fused: Choose
    whole: bool  # fused operators are whole on every device; otherwise they have no partial sums


def cases() -> dict[str, Case]:
    ids = jax.ShapeDtypeStruct((8192, 8), jnp.int32)
    tables = {"tables": [f32(1_000_000, 64)] * 8, "in": f32(512, 256), "out": f32(256, 1)}
    wide = [f32(8192, 8192) for _ in range(4)]
    return {
        "2: two layers, b 64, h 512, ci 784, co 10, 2 devices": Case(
            mlp, ([f32(784, 512), f32(512, 10)], f32(64, 784)), slow_link(), product_before_elements, False
        ),
        "16a: four layers of 8192, b 64, 8 V100": Case(
            mlp, (wide, f32(64, 8192)), roomy(Machine.grid(1, 8, "v100")), product_before_elements, False
        ),
        "16a: four layers of 8192, b 64, 16 x 6 V100": Case(
            mlp, (wide, f32(64, 8192)), roomy(Machine.grid(16, 6, "v100")), product_before_elements, False
        ),
        "16b: eight tables joined, 8 V100": Case(
            looked_up, (tables, ids, f32(8192, 1)), roomy(Machine.grid(1, 8, "v100")), join, True
        ),
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
    captured = capture(case.fn, *case.args)
    chosen = Rewriter(None, budget_of(None)).best(captured, Prices(case.machine.alone, training), lambda stage: None)
    after = captured if chosen is None else chosen.after
    users: dict[int, list[Node]] = {}
    for node in after.graph.nodes:
        for v in node.operands:
            users.setdefault(id(v.node), []).append(node)
    restricted = 0

    def restrict(dimensions: Dimensions, machine: Machine) -> Mapping[int, Mask]:
        nonlocal restricted
        found: dict[int, Mask] = {}
        for s, site in enumerate(dimensions.opened.sites):
            if not case.fused(site, users):
                continue
            choices = [c.states for c in dimensions.found[s]]
            good = [all(t.kind in "UR" for t in c) if case.whole else PARTIAL not in c for c in choices]
            kept = frozenset(c for c, left in zip(choices, good, strict=True) if left)
            found[s] = (Along(tuple(range(len(machine.axes))), kept),)
        restricted = len(found)
        return found

    fused = Search(after.graph, after.differentiated, case.machine, training, restrict=restrict).fastest
    graphs = {"data parallel": data.pcg, "fused": parallelize(after.graph, fused.assignment), "joint": joint.pcg}
    return {
        "case": name,
        "operators restricted": restricted,
        "data parallel ms": data.time * 1e3,
        "fused ms": fused.time * 1e3,
        "sequential ms": sequential.time * 1e3,
        "joint ms": joint.time * 1e3,
        "fused / joint": fused.time / joint.time,
        "sequential / joint": sequential.time / joint.time,
        **{f"{k}: elements sent": sent(g, case.machine, after.differentiated) for k, g in graphs.items()},
    }


def main() -> None:
    chosen, whole = asked(__doc__, cases())
    rows = []
    for name in chosen:
        rows.append(measured(name))
        show(name, rows[-1:])
    if whole:
        record("figure16", rows)


if __name__ == "__main__":
    main()
