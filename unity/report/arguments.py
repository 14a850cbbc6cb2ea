"""Which device holds which slice of every argument; arguments that are alike once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from unity.base.formatting import pattern, size
from unity.diff.placements import type_in_words
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Type, degrees, digits, show
from unity.search.memory.memory import local


@dataclass(frozen=True)
class Kind:
    """Arguments that have one name but for numbers, one shape and one type: one of them, how many, and the bytes of all."""

    name: str
    node: Node
    count: int
    whole: float
    here: float  # on one device


def kinds(graph: PCG) -> tuple[Kind, ...]:
    """The arguments of a parallel graph, those first that take most of a device's memory."""
    found: dict[tuple[str, str, tuple[Type, ...]], Kind] = {}
    for node in graph.inputs:
        name, whole, here = pattern(str(node.attributes.get("name", "input"))), node.tensors[0].nbytes, local(Value(node), graph)
        key = name, str(node.tensors[0]), node.types
        old = found.get(key, Kind(name, node, 0, 0.0, 0.0))
        found[key] = Kind(name, old.node, old.count + 1, old.whole + whole, old.here + here)
    return tuple(sorted(found.values(), key=lambda k: -k.here))


def rows(graph: PCG) -> list[dict[str, Any]]:
    """Every kind as data: how it is held in words, its shape in slices, and the number of the slice that each device holds."""
    return [
        {
            "name": k.name,
            "count": k.count,
            "tensor": str(k.node.tensors[0]),
            "held": type_in_words(k.node.types[0], graph.axes),
            "type": show(k.node.types[0], graph.axes, k.node.tensors[0].ndim),
            "whole": [k.whole, size(k.whole)],
            "here": [k.here, size(k.here)],
            "shape": list(k.node.tensors[0].shape),
            "slices": list(degrees(k.node.types[0], graph.axes, k.node.tensors[0].ndim)),
            "devices": [_flat(s, k, graph.axes) for s in slices(k.node.types[0], graph.axes, k.node.tensors[0].ndim)],
        }
        for k in kinds(graph)
    ]


def slices(type_: Type, axes: Sequence[Axis], rank: int) -> list[tuple[int, ...]]:
    """For every device, in mesh order, which slice of each dimension it holds. Of arguments: they are sliced at major digits."""
    cut, of = digits(type_, axes), degrees(type_, axes, rank)
    found = []
    for place in product(*(range(a.size) for a in axes)):
        here = [0] * rank
        for index, digit in zip(place, cut, strict=True):
            if digit is not None:
                here[digit.dim] += index * (of[digit.dim] // (digit.outer * digit.size))
        found.append(tuple(here))
    return found


def _flat(slice_: Sequence[int], kind: Kind, axes: Sequence[Axis]) -> int:
    """A slice's number, counted row by row."""
    number = 0
    for index, n in zip(slice_, degrees(kind.node.types[0], axes, kind.node.tensors[0].ndim), strict=True):
        number = number * n + index
    return number
