"""Division of a parallel graph into the pieces that an export writes: units, one for each operator, and repeated layers.

A unit includes the gathers and operators that the backward pass recomputes for its operator. A layer is a sequence of units that
occurs several times, wired alike, and becomes one function.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import networkx as nx

from unity.export.tracing import LocalProgram, local_program
from unity.pcg.analysis.recomputation_marks import runs_again
from unity.pcg.capture.repetition import repeated, signature
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value


def _identity(node: Node) -> tuple[int, ...]:
    """Return the ids of the functions in a node's program, or in its nested graph (see `Body.identity`)."""
    nested = () if node.inside is None else (inner for inner, _ in node.inside.walk())
    return tuple(i for n in (node, *nested) if n.body is not None for i in n.body.identity)


@dataclass(frozen=True, eq=False)
class Unit:
    """An operator, the nodes that are recomputed with it, and the operands of all of them."""

    node: Node
    rerun: tuple[Node, ...]
    operands: tuple[Value, ...]

    @property
    def results(self) -> tuple[Value, ...]:
        return self.node.results

    @property
    def key(self) -> Hashable:
        """A key that is equal for units that compute the same function of their operands."""
        number = {v: ("operand", k) for k, v in enumerate(self.operands)}
        parts: list[Hashable] = [(str(v.tensor), v.type) for v in self.operands]
        for k, node in enumerate((*self.rerun, self.node)):
            parts.append((signature(node), _identity(node), id(node.policy), *(number[v] for v in node.operands)))
            number.update((v, ("made", k + v.index)) for v in node.results)
        return tuple(parts)

    def program(self, graph: PCG) -> LocalProgram:
        """Return the unit's local program, traced."""
        inputs = [Node("input", (), (v.tensor,), types=(v.type,)) for v in self.operands]
        new = {v: Value(n) for v, n in zip(self.operands, inputs, strict=True)}
        for node in (*self.rerun, self.node):
            copied = replace(node, operands=tuple(new[v] for v in node.operands))
            new.update(zip(node.results, copied.results, strict=True))
        return local_program(PCG(tuple(inputs), tuple(new[v] for v in self.results), graph.axes))


def units(graph: PCG) -> list[Unit]:
    """Return a graph's units, in order."""
    rerun: set[int] = set()  # nodes that become parts of the units of their users
    units = []
    for node in graph.nodes:
        if runs_again(node) or (
            node.kind in PARALLELIZATION and (id(node.operands[0].node) in rerun or (node.kind != "view" and node.again))
        ):
            rerun.add(id(node))
        elif node.kind != "input":
            units.append(_unit(node, rerun))
    return units + [_unit(v.node, rerun) for v in dict.fromkeys(graph.outputs) if id(v.node) in rerun]


def _unit(node: Node, rerun: set[int]) -> Unit:
    nodes: dict[int, Node] = {}
    operands: dict[Value, None] = {}

    def read(values: Sequence[Value]) -> None:
        for v in values:
            if id(v.node) in rerun:
                read(v.node.operands)
                nodes.setdefault(id(v.node), v.node)
            else:
                operands.setdefault(v)

    read(node.operands)
    return Unit(node, tuple(nodes.values()), tuple(operands))


@dataclass(frozen=True, eq=False)
class Layer:
    """Segments of a graph that compute the same function.

    Attributes:
        segments: the units of each segment.
        slots: for every parameter of the function, the (unit, operand) positions where it is read.
        results: the (unit, result) positions of the values that are used outside of a segment.
    """

    segments: tuple[tuple[Unit, ...], ...]
    slots: tuple[tuple[tuple[int, int], ...], ...]
    results: tuple[tuple[int, int], ...]

    def arguments_of(self, segment: int) -> list[Value]:
        """Return the arguments of one segment, parameter by parameter."""
        return [self.segments[segment][i].operands[j] for (i, j), *_ in self.slots]

    def results_of(self, segment: int) -> list[Value]:
        """Return the results of one segment."""
        return [self.segments[segment][i].results[k] for i, k in self.results]


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One run of a layer."""

    layer: Layer
    segment: int


Item: TypeAlias = Unit | LayerCall


def items(graph: PCG) -> list[Item]:
    """Return a graph's units and layer calls, operands before users."""
    every = units(graph)
    of_node = {id(u.node): u for u in every}
    users: dict[Value, set[int]] = {}
    for u in every:
        for v in u.operands:
            users.setdefault(v, set()).add(id(u))
    for v in graph.outputs:
        users.setdefault(v, set()).add(-1)
    calls: list[Item] = []
    in_layers: set[int] = set()
    for run in repeated(graph):
        segments = [tuple(of_node[id(n)] for n in s if id(n) in of_node) for s in run.segments]
        for layer in _layers(segments, users):
            calls += [LayerCall(layer, k) for k in range(len(layer.segments))]
            in_layers |= {id(u) for s in layer.segments for u in s}
    return _in_order([*calls, *(u for u in every if id(u) not in in_layers)], {id(u): k for k, u in enumerate(every)})


def _layers(segments: Sequence[tuple[Unit, ...]], users: dict[Value, set[int]]) -> list[Layer]:
    """Return the layers of segments that are wired alike. A segment that is like no other is part of none."""
    by_wiring: dict[Hashable, list[tuple[Unit, ...]]] = {}
    for s in segments:
        number = {v: (i, k) for i, u in enumerate(s) for k, v in enumerate(u.results)}
        wiring = tuple((u.key, *(number.get(v) for v in u.operands)) for u in s)
        by_wiring.setdefault(wiring, []).append(s)
    return [_layer(tuple(group), users) for group in by_wiring.values() if len(group) > 1 and len(group[0]) > 1]


def _layer(segments: tuple[tuple[Unit, ...], ...], users: dict[Value, set[int]]) -> Layer:
    own = [{v for u in s for v in u.results} for s in segments]
    slots: dict[tuple[Value, ...], list[tuple[int, int]]] = {}
    for i, u in enumerate(segments[0]):
        for j, v in enumerate(u.operands):
            if v not in own[0]:
                slots.setdefault(tuple(s[i].operands[j] for s in segments), []).append((i, j))
    results = []
    for i, u in enumerate(segments[0]):
        for k in range(len(u.results)):
            if any(users.get(s[i].results[k], set()) - {id(x) for x in s} for s in segments):
                results.append((i, k))
    return Layer(segments, tuple(map(tuple, slots.values())), tuple(results))


def _members(item: Item) -> tuple[Unit, ...]:
    return item.layer.segments[item.segment] if isinstance(item, LayerCall) else (item,)


def _in_order(items: Sequence[Item], place: dict[int, int]) -> list[Item]:
    """Return items in topological order, and otherwise in the order of the graph."""
    producer_of = {v: k for k, item in enumerate(items) for u in _members(item) for v in u.results}
    operands = ((k, v) for k, item in enumerate(items) for u in _members(item) for v in u.operands)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(items)))
    graph.add_edges_from((producer_of[v], k) for k, v in operands if producer_of.get(v, k) != k)
    first = [min(place[id(u)] for u in _members(item)) for item in items]
    return [items[k] for k in nx.lexicographical_topological_sort(graph, first.__getitem__)]
