"""Repeated layers of a graph, as one function each: which operators are its body, and what it is given every time."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from unity.export.units import Unit, units
from unity.pcg.capture.repetition import repeated
from unity.pcg.ir.graph import PCG, Value


@dataclass(frozen=True, eq=False)
class Layer:
    """Segments of a graph that do the same.

    `slots`: for every parameter, where it is read, as (unit, operand) positions; `results`: the (unit, result) positions of what is
    used outside of a segment.
    """

    segments: tuple[tuple[Unit, ...], ...]
    slots: tuple[tuple[tuple[int, int], ...], ...]
    results: tuple[tuple[int, int], ...]

    def given(self, segment: int) -> list[Value]:
        """What one segment is given, parameter by parameter."""
        return [self.segments[segment][i].operands[j] for (i, j), *_ in self.slots]

    def made(self, segment: int) -> list[Value]:
        """What one segment gives."""
        return [self.segments[segment][i].results[k] for i, k in self.results]


@dataclass(frozen=True, eq=False)
class Call:
    """One run of a layer."""

    layer: Layer
    segment: int


Item: TypeAlias = Unit | Call


def items(graph: PCG) -> list[Item]:
    """A graph's units and runs of layers, operands before users."""
    every = units(graph)
    of_node = {id(u.node): u for u in every}
    used: dict[Value, set[int]] = {}
    for u in every:
        for v in u.operands:
            used.setdefault(v, set()).add(id(u))
    for v in graph.outputs:
        used.setdefault(v, set()).add(-1)
    calls: list[Item] = []
    inside: set[int] = set()
    for run in repeated(graph):
        segments = [tuple(of_node[id(n)] for n in s if id(n) in of_node) for s in run.segments]
        for layer in _layers(segments, used):
            calls += [Call(layer, k) for k in range(len(layer.segments))]
            inside |= {id(u) for s in layer.segments for u in s}
    return _ordered([*calls, *(u for u in every if id(u) not in inside)], {id(u): k for k, u in enumerate(every)})


def _layers(segments: Sequence[tuple[Unit, ...]], used: dict[Value, set[int]]) -> list[Layer]:
    """Segments that are wired alike, as layers; one that is like no other stays as it is."""
    alike: dict[Hashable, list[tuple[Unit, ...]]] = {}
    for s in segments:
        number = {v: (i, k) for i, u in enumerate(s) for k, v in enumerate(u.results)}
        wiring = tuple((u.key, *(number.get(v) for v in u.operands)) for u in s)
        alike.setdefault(wiring, []).append(s)
    return [_layer(tuple(group), used) for group in alike.values() if len(group) > 1 and len(group[0]) > 1]


def _layer(segments: tuple[tuple[Unit, ...], ...], used: dict[Value, set[int]]) -> Layer:
    own = [{v for u in s for v in u.results} for s in segments]
    slots: dict[tuple[Value, ...], list[tuple[int, int]]] = {}
    for i, u in enumerate(segments[0]):
        for j, v in enumerate(u.operands):
            if v not in own[0]:
                slots.setdefault(tuple(s[i].operands[j] for s in segments), []).append((i, j))
    results = []
    for i, u in enumerate(segments[0]):
        for k in range(len(u.results)):
            if any(used.get(s[i].results[k], set()) - {id(x) for x in s} for s in segments):
                results.append((i, k))
    return Layer(segments, tuple(map(tuple, slots.values())), tuple(results))


def members(item: Item) -> tuple[Unit, ...]:
    """The units of an item."""
    return item.layer.segments[item.segment] if isinstance(item, Call) else (item,)


def _ordered(found: Sequence[Item], place: dict[int, int]) -> list[Item]:
    """Operands before users, otherwise as in the graph."""
    maker = {v: k for k, item in enumerate(found) for u in members(item) for v in u.results}
    before = [{maker[v] for u in members(item) for v in u.operands if v in maker} - {k} for k, item in enumerate(found)]
    after: list[list[int]] = [[] for _ in found]
    for k, needed in enumerate(before):
        for j in needed:
            after[j].append(k)
    first = [min(place[id(u)] for u in members(item)) for item in found]
    ready = [(first[k], k) for k, needed in enumerate(before) if not needed]
    heapq.heapify(ready)
    order: list[Item] = []
    left = [len(needed) for needed in before]
    while ready:
        _, k = heapq.heappop(ready)
        order.append(found[k])
        for j in after[k]:
            left[j] -= 1
            if not left[j]:
                heapq.heappush(ready, (first[j], j))
    assert len(order) == len(found), "layers of a graph are in the order of its operators"
    return order
