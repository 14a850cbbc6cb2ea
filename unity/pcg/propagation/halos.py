"""Messages between neighbours for halos, defined once for costs, traffic, proofs and the running program.

Along a dimension that carries a halo, device k of d holds the k-th of d equal slices, of p indices each. If windows reach `before`
indices back, device k - 1 sends its last indices; if p is less than `before`, device k - 2 sends some too, and so on. Indices
beyond the tensor's border are not sent. Several dimensions are exchanged one after another, each including the halos that arrived
along earlier ones, so that corners arrive too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from unity.pcg.ir.graph import PCG, Node
from unity.pcg.ir.program import Body
from unity.pcg.propagation.placement import Placing
from unity.pcg.propagation.propagation import Solution
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.axis import Axis
from unity.pcg.types.factors import Halo, Reach
from unity.pcg.types.parallel_type import UNUSED, Shape, local_shape


@dataclass(frozen=True)
class Message:
    """A message from each device to the one `ahead` places after it (before it, if negative): its `indices` outermost indices."""

    ahead: int
    indices: int


@lru_cache(maxsize=65536)
def messages(halo: Halo, piece: int, devices: int) -> tuple[Message, ...]:
    """Return the messages along a dimension of which each device has `piece` indices, those from preceding devices first."""
    result = []
    for direction, width in ((1, halo.before), (-1, halo.after)):
        for distance in range(1, devices):
            indices = min(piece, width - (distance - 1) * piece)
            if indices > 0:
                result.append(Message(direction * distance, indices))
    return tuple(result)


def sent(elements: int, along: Sequence[tuple[int, int, Halo]]) -> Iterator[tuple[int, Message, int]]:
    """Yield every message of one operand as (position in `along`, message, elements sent).

    Args:
        elements: of the operand on one device.
        along: for each dimension, in the order of exchange, (indices of a piece, devices, halo).
    """
    for k, (piece, devices, halo) in enumerate(along):
        for message in messages(halo, piece, devices):
            yield k, message, elements // piece * message.indices
        if devices > 1:
            elements = elements // piece * (piece + halo.before + halo.after)


@dataclass(frozen=True)
class HaloEdge:
    """A halo at one operand of an equation (by number) in a body."""

    equation: int
    variable: int
    reach: Reach


def halo_edges(body: Body, solution: Solution) -> tuple[HaloEdge, ...]:
    """Return the halos that are exchanged along one axis: those of dimensions that it partitions."""
    result = []
    for i, (e, match) in enumerate(zip(body.equations, solution.matches, strict=False)):
        spec = spec_of(body, e) if match.halo else None
        for reach in spec.halos if spec is not None else ():
            atom, state = e.operands[reach.operand], match.operands[reach.operand]
            if isinstance(atom, int) and state.kind == "P" and state.dim == reach.dim:
                result.append(HaloEdge(i, atom, reach))
    return tuple(result)


@dataclass(frozen=True)
class Exchange:
    """A message of one operator's program."""

    edge: HaloEdge
    axes: tuple[int, ...]  # positions in the mesh
    message: Message
    elements: int  # on one device
    before: tuple[Reach, ...]  # the halos by which the operand is already extended


def exchanges(body: Body, placing: Placing, axes: tuple[Axis, ...]) -> Iterator[Exchange]:
    """Yield all messages of a body with this placement."""
    for edges, axes_of in _extended_operands(body, placing):
        shape = _local_shape(body, placing, axes, edges[0].variable)
        along = [(shape[e.reach.dim], prod(axes[k].size for k in axes_of[e]), e.reach.halo) for e in edges]
        for k, message, elements in sent(prod(shape), along):
            yield Exchange(edges[k], tuple(axes_of[edges[k]]), message, elements, tuple(e.reach for e in edges[:k]))


def extended(body: Body, placing: Placing, axes: tuple[Axis, ...]) -> Mapping[int, int]:
    """Return the variables that are read together with halos, each with the elements of its largest extended copy on one device."""
    elements: dict[int, int] = {}
    for edges, _ in _extended_operands(body, placing):
        variable = edges[0].variable
        shape = list(_local_shape(body, placing, axes, variable))
        for e in edges:
            shape[e.reach.dim] += e.reach.halo.before + e.reach.halo.after
        elements[variable] = max(elements.get(variable, 0), prod(shape))
    return elements


def _extended_operands(body: Body, placing: Placing) -> Iterator[tuple[list[HaloEdge], Mapping[HaloEdge, list[int]]]]:
    """Yield for each operand that halos extend its halos in the order of exchange, and the mesh axes of every halo."""
    axes_of: dict[HaloEdge, list[int]] = {}
    for k, solution in enumerate(placing):
        for edge in halo_edges(body, solution) if solution is not None else ():
            axes_of.setdefault(edge, []).append(k)
    operands: dict[tuple[int, int], list[HaloEdge]] = {}
    for edge in sorted(axes_of, key=lambda e: (e.equation, e.reach.operand, e.reach.dim)):
        operands.setdefault((edge.equation, edge.reach.operand), []).append(edge)
    for edges in operands.values():
        yield edges, axes_of


def _local_shape(body: Body, placing: Placing, axes: tuple[Axis, ...], variable: int) -> Shape:
    """Return the shape of a variable on one device, as its users see it."""
    type_ = tuple(UNUSED if s is None else s.seen(variable) for s in placing)
    return local_shape(body.tensors[variable].shape, type_, axes)


def undivided_windows(graph: PCG) -> Iterator[tuple[Node, int, str]]:
    """Yield (operator, dimension of its first operand, reason) wherever windows move along a dimension that cannot be divided."""
    for node, _ in graph.walk():
        body = node.body
        for spec in (spec_of(body, e) for e in body.equations) if body is not None else ():
            for dim, why in spec.blocked if spec is not None else ():
                yield node, dim, why
