"""Pairs of collectives that XLA's runtime for CPUs confuses, so that a plan with such a pair cannot run there.

The runtime tells the collectives of a JAX program apart only by their kind and devices. One inside of a conditional and one outside
may run at the same time. If they are alike and neither depends on the other, processes end with overrun buffers or wait for ever.

This was observed with JAX 0.10: the runtime reports the collective that waits, and exactly the programs with such pairs fail.
A pair counts as unordered if the graph does not order it, although a compiler may have ordered it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import networkx as nx
from jax.sharding import Mesh

from unity.base.errors import PlanError
from unity.exec.lowering import platform_of
from unity.pcg.ir.graph import BRANCHES, PCG, Node
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.parallel.branches import groups_of
from unity.pcg.parallel.traffic import Collective, traffic


def is_runnable(graph: PCG, mesh: Mesh) -> bool:
    """Return whether the runtime of the mesh's devices can run a parallel graph."""
    return _first_pair(graph, mesh) is None


def refuse_entangled(graph: PCG, mesh: Mesh, names: Callable[[], AxisNames]) -> None:
    """Raise PlanError, naming a pair of collectives, if the runtime of the mesh's devices cannot run a parallel graph.

    Args:
        graph: the graph.
        mesh: the devices.
        names: returns the names of the graph's axes that users see.
    """
    if (pair := _first_pair(graph, mesh)) is not None:
        beside, inside = pair
        kind = f"{inside.kind} over {names().in_words(inside.axes)}"
        where, other = line_of(inside.node, graph) or "a branch", line_of(beside.node, graph) or "what is outside of it"
        raise PlanError(
            f"{where}: this plan cannot be run on CPU devices. Inside of a branch it has an {kind};"
            f"\n    {other} may have another at the same time, which XLA's"
            " runtime for CPUs cannot tell apart.\n    Plan with branches=False to try it here. On GPUs it can be run."
            " (docs: branches#on-virtual-devices)"
        )


def line_of(node: Node, graph: PCG) -> str:
    """Return the user's line of a node, or else of the nearest that it reads from, or that reads from it; empty without any.

    A change of type has no line, and in a branch it may read an input, which has none either.
    """
    readers: dict[int, list[Node]] = {}
    for inner, _ in graph.walk():
        for v in inner.operands:
            readers.setdefault(id(v.node), []).append(inner)
    up = _nearest(node, lambda n: [v.node for v in n.operands])
    return up or _nearest(node, lambda n: readers.get(id(n), []))


def _nearest(node: Node, steps: Callable[[Node], Sequence[Node]]) -> str:
    """Return the first user's line on the way from a node."""
    queue, seen = [node], {id(node)}
    for near in queue:
        if near.source:
            return near.source
        new = [n for n in steps(near) if id(n) not in seen]
        seen.update(map(id, new))
        queue += new
    return ""


def _first_pair(graph: PCG, mesh: Mesh) -> tuple[Collective, Collective] | None:
    return next(entangled(graph), None) if platform_of(mesh) == "cpu" else None


def entangled(graph: PCG) -> Iterator[tuple[Collective, Collective]]:
    """Yield pairs of a collective outside of branches and one inside: equal in kind and devices, and independent of each other."""
    for node in graph.nodes:
        if node.kind != BRANCHES:
            yield from entangled(node.inside) if node.inside is not None else ()
            continue
        inside = {_identity(c): c for group in groups_of(node) for c in _training_traffic(group.graph)}
        outside = _training_traffic(graph) if inside else ()
        ancestors, unordered = _order_around(graph, node)
        # merged sums of gradients wait for the gradients of values that the branches read
        waiting = {_identity(c) for c in outside if c.merged and id(c.node) in ancestors}
        for c in outside:
            if id(c.node) in unordered and _identity(c) in inside and not (c.merged and _identity(c) in waiting):
                yield c, inside[_identity(c)]


def _training_traffic(graph: PCG) -> Sequence[Collective]:
    return traffic(graph, [k for k, n in enumerate(graph.inputs) if n.tensors[0].floating])


def _identity(c: Collective) -> tuple[str, str, frozenset[int]]:
    """Return the properties by which the runtime tells collectives apart."""
    return c.direction, c.kind, frozenset(c.axes)


def _order_around(graph: PCG, node: Node) -> tuple[set[int], set[int]]:
    """Return the operators, by id, that an operator depends on, and those that neither depend on it nor it on them."""
    dependencies = nx.DiGraph((id(v.node), id(n)) for n in graph.nodes for v in n.operands)
    ancestors = nx.ancestors(dependencies, id(node))
    return ancestors, set(map(id, graph.nodes)) - ancestors - nx.descendants(dependencies, id(node)) - {id(node)}
