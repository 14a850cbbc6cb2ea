"""The arguments of a plan with the slice that each device holds, one row for equal arguments of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from unity.base.formatting import size
from unity.diff.placements import type_in_words
from unity.pcg.ir.graph import PCG
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Type, degrees, digits, show
from unity.plan.argument_kinds import ArgumentKind, argument_kinds


def rows(graph: PCG) -> list[dict[str, Any]]:
    """Return every kind of argument as data: its type in words, its shape in slices, and the number of each device's slice."""
    return [_row(kind, graph.axes) for kind in argument_kinds(graph)]


def _row(kind: ArgumentKind, axes: tuple[Axis, ...]) -> dict[str, Any]:
    tensor, type_ = kind.node.tensors[0], kind.node.types[0]
    counts = degrees(type_, axes, tensor.ndim)
    return {
        "name": kind.name,
        "count": kind.count,
        "tensor": str(tensor),
        "held": type_in_words(type_, axes),
        "type": show(type_, axes, tensor.ndim),
        "whole": [kind.whole, size(kind.whole)],
        "here": [kind.here, size(kind.here)],
        "shape": list(tensor.shape),
        "slices": list(counts),
        "devices": [_slice_number(s, counts) for s in slices(type_, axes, tensor.ndim)],
    }


def slices(type_: Type, axes: Sequence[Axis], rank: int) -> list[tuple[int, ...]]:
    """Return, for every device in mesh order, the slice of each dimension that it holds. Arguments are sliced at major digits."""
    cut, parts = digits(type_, axes), degrees(type_, axes, rank)
    by_device = []
    for coordinates in product(*(range(a.size) for a in axes)):
        slice_ = [0] * rank
        for index, digit in zip(coordinates, cut, strict=True):
            if digit is not None:
                slice_[digit.dim] += index * (parts[digit.dim] // (digit.outer * digit.size))
        by_device.append(tuple(slice_))
    return by_device


def _slice_number(slice_: Sequence[int], counts: Sequence[int]) -> int:
    """Return a slice's number, counted in row-major order. `counts` are the numbers of slices of each dimension."""
    number = 0
    for index, n in zip(slice_, counts, strict=True):
        number = number * n + index
    return number
