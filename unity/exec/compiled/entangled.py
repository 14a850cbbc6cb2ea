"""Collectives that XLA's runtime for CPUs mixes up.

As JAX numbers them, it tells collectives apart by their kind and devices alone. Those inside of a conditional and those outside it
may take at the same time: where both are alike, and neither needs the other, processes end with overrun buffers, or wait for ever.
Seen with JAX 0.10: the runtime names what waits, and of equal programs those with such pairs end so. Which pairs have no order is
read off the graph; a compiler may have given them one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import networkx as nx
from jax.sharding import Mesh

from unity.base.errors import PlanError
from unity.exec.lowering import platform_of
from unity.pcg.ir.graph import BRANCHES, PCG, Node
from unity.pcg.parallel.branches import groups_of
from unity.pcg.parallel.traffic import Collective, traffic

if TYPE_CHECKING:
    from unity.plan.plan import Plan


def can_run(plan: Plan) -> bool:
    """Whether the runtime of a plan's devices can run it."""
    return _pair(plan.pcg, plan.mesh) is None


def refuse_entangled(graph: PCG, mesh: Mesh) -> None:
    """Raises PlanError where these devices' runtime cannot run a parallel graph, and names a pair."""
    if (found := _pair(graph, mesh)) is not None:
        beside, inside = found
        what = f"{inside.kind} along {' and '.join(graph.axes[k].name for k in inside.axes)}"
        raise PlanError(
            f"{inside.node.source or 'a branch'}: this plan cannot be run on CPU devices. Inside of a branch it has an {what};"
            f"\n    {beside.node.source or 'what is outside of it'} may have another at the same time, which XLA's"
            " runtime for CPUs cannot tell apart.\n    Plan with branches=False to try it here. On GPUs it can be run."
            " (docs: branches#on-virtual-devices)"
        )


def _pair(graph: PCG, mesh: Mesh) -> tuple[Collective, Collective] | None:
    return next(entangled(graph), None) if platform_of(mesh) == "cpu" else None


def entangled(graph: PCG) -> Iterator[tuple[Collective, Collective]]:
    """Pairs of a collective outside of branches and one inside, equal in kind and devices, of which neither needs the other."""
    for node in graph.nodes:
        if node.kind != BRANCHES:
            yield from entangled(node.inside) if node.inside is not None else ()
            continue
        inside = {_alike(c): c for group in groups_of(node) for c in _all(group.graph)}
        outside = _all(graph) if inside else ()
        before, beside = _around(graph, node)
        # sums of gradients are put together, and so wait for the gradients of what branches read
        waiting = {_alike(c) for c in outside if c.merged and id(c.node) in before}
        for c in outside:
            if id(c.node) in beside and _alike(c) in inside and not (c.merged and _alike(c) in waiting):
                yield c, inside[_alike(c)]


def _all(graph: PCG) -> Sequence[Collective]:
    return traffic(graph, [k for k, n in enumerate(graph.inputs) if n.tensors[0].floating])


def _alike(c: Collective) -> tuple[str, str, frozenset[int]]:
    return c.direction, c.kind, frozenset(c.axes)


def _around(graph: PCG, node: Node) -> tuple[set[int], set[int]]:
    """The operators that an operator needs, and those that it neither needs nor is needed by."""
    needs = nx.DiGraph((id(v.node), id(n)) for n in graph.nodes for v in n.operands)
    before = nx.ancestors(needs, id(node))
    return before, set(map(id, graph.nodes)) - before - nx.descendants(needs, id(node)) - {id(node)}
