"""What neighbours exchange for halos: written once, for costs, traffic, proofs and the running program.

Along a dimension that carries a halo, device k of d holds the k-th of d equal slices, p indices each. For `before` indices that
its windows reach back, the one before sends its last ones; if these are fewer than wanted, the one before that sends some too,
and so on. What lies beyond the tensor's border nobody sends. Several dimensions follow one another, each with what came along
those before it, so that corners arrive too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from unity.pcg.ir.graph import PCG, Node
from unity.pcg.ir.program import Body
from unity.pcg.propagation.placement import Placing
from unity.pcg.propagation.solver import Solution, spec_of
from unity.pcg.types.axis import Axis
from unity.pcg.types.factors import Halo, Reach
from unity.pcg.types.parallel_type import UNUSED, Shape, local_shape


@dataclass(frozen=True)
class Message:
    """What each device sends to the one `ahead` places after it (before it, if negative): so many indices, its outermost."""

    ahead: int
    indices: int


@lru_cache(maxsize=65536)
def messages(halo: Halo, piece: int, devices: int) -> tuple[Message, ...]:
    """The messages along a dimension of which each device has a piece of so many indices; those from before come first."""
    found = []
    for direction, wanted in ((1, halo.before), (-1, halo.after)):
        for distance in range(1, devices):
            indices = min(piece, wanted - (distance - 1) * piece)
            if indices > 0:
                found.append(Message(direction * distance, indices))
    return tuple(found)


def sent(elements: int, along: Sequence[tuple[int, int, Halo]]) -> Iterator[tuple[int, Message, int]]:
    """Every message of one operand: along which of its dimensions, and its elements.

    `elements`: of the operand on one device. `along`: for each dimension, in turn, (indices of a piece, devices, halo).
    """
    for k, (piece, devices, halo) in enumerate(along):
        for message in messages(halo, piece, devices):
            yield k, message, elements // piece * message.indices
        if devices > 1:
            elements = elements // piece * (piece + halo.before + halo.after)


@dataclass(frozen=True)
class Edge:
    """A halo of an equation (by number) in a body, at one operand."""

    equation: int
    variable: int
    reach: Reach


def edges(body: Body, solution: Solution) -> tuple[Edge, ...]:
    """The halos that one axis takes part in: those of dimensions that it partitions."""
    found = []
    for i, (e, match) in enumerate(zip(body.equations, solution.matches, strict=False)):
        spec = spec_of(body, e) if match.halo else None
        for reach in spec.halos if spec is not None else ():
            atom, state = e.operands[reach.operand], match.operands[reach.operand]
            if isinstance(atom, int) and state.kind == "P" and state.dim == reach.dim:
                found.append(Edge(i, atom, reach))
    return tuple(found)


@dataclass(frozen=True)
class Exchange:
    """A message of one operator's program. `axes`: positions in the mesh. `before`: what the value was extended by till then."""

    edge: Edge
    axes: tuple[int, ...]
    message: Message
    elements: int  # on one device
    before: tuple[Reach, ...]


def exchanges(body: Body, placing: Placing, axes: tuple[Axis, ...]) -> Iterator[Exchange]:
    """All messages of a body whose variables lie so."""
    for found, over in _extended(body, placing):
        shape = _piece(body, placing, axes, found[0].variable)
        along = [(shape[e.reach.dim], prod(axes[k].size for k in over[e]), e.reach.halo) for e in found]
        for k, message, elements in sent(prod(shape), along):
            yield Exchange(found[k], tuple(over[found[k]]), message, elements, tuple(e.reach for e in found[:k]))


def extended(body: Body, placing: Placing, axes: tuple[Axis, ...]) -> Mapping[int, int]:
    """The variables that are read with what neighbours have of them, and the elements of such a copy on one device."""
    made: dict[int, int] = {}
    for found, _ in _extended(body, placing):
        variable = found[0].variable
        shape = list(_piece(body, placing, axes, variable))
        for e in found:
            shape[e.reach.dim] += e.reach.halo.before + e.reach.halo.after
        made[variable] = max(made.get(variable, 0), prod(shape))
    return made


def _extended(body: Body, placing: Placing) -> Iterator[tuple[list[Edge], Mapping[Edge, list[int]]]]:
    """For each operand that halos extend, its halos in turn, and the axes of each."""
    over: dict[Edge, list[int]] = {}
    for k, solution in enumerate(placing):
        for edge in edges(body, solution) if solution is not None else ():
            over.setdefault(edge, []).append(k)
    operands: dict[tuple[int, int], list[Edge]] = {}
    for edge in sorted(over, key=lambda e: (e.equation, e.reach.operand, e.reach.dim)):
        operands.setdefault((edge.equation, edge.reach.operand), []).append(edge)
    for found in operands.values():
        yield found, over


def _piece(body: Body, placing: Placing, axes: tuple[Axis, ...], variable: int) -> Shape:
    """The shape of a variable on one device, as those that read it find it."""
    type_ = tuple(UNUSED if s is None else s.seen(variable) for s in placing)
    return local_shape(body.tensors[variable].shape, type_, axes)


def kept_whole(graph: PCG) -> Iterator[tuple[Node, int, str]]:
    """Operators along whose windows no axis can go: which dimension of the windows' operand stays whole, and why."""
    for node, _ in graph.walk():
        body = node.body
        for spec in (spec_of(body, e) for e in body.equations) if body is not None else ():
            for dim, why in spec.blocked if spec is not None else ():
                yield node, dim, why
