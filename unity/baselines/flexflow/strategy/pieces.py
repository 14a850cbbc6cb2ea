"""The pieces of an operator whose output dimensions are split (FlexFlow, section 4), derived from the operator table.

A dimension of an operator's first result can be split if one of the operator's choices along an axis partitions the result there.
That choice also says which slice of each operand a piece needs, and how much of the slices beside it (halos), what part of the work
it does, and what must be reduced among the pieces. A result without dimensions, a loss, is the sum of what pieces of the largest
operand give. Dimensions are split independently, each into equal parts; pieces are numbered row by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from math import gcd, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unity.pcg.ir.graph import Node
from unity.pcg.ir.program import Body
from unity.pcg.propagation.choices import Choice, choices, part_of_work
from unity.pcg.types.parallel_type import PARTIAL, State

Degrees = tuple[int, ...]
Reach = tuple[int, int]  # indices before a part, and after it
Cuts = tuple[tuple[int, int], ...]  # of a dimension: outer, degree (`Slices`)


def reference(node: Node) -> int:
    """The operand or result (positions of results follow operands') whose dimensions are split."""
    n = len(node.operands)
    return n if node.tensors[0].shape or not n else max(range(n), key=lambda p: node.operands[p].tensor.nbytes)


def split_shape(node: Node) -> tuple[int, ...]:
    """The dimensions that degrees are given for."""
    position, n = reference(node), len(node.operands)
    return node.operands[position].tensor.shape if position < n else node.tensors[position - n].shape


def splits(node: Node) -> Mapping[int, Choice]:
    """The dimensions that can be split, and the choice behind each: what divides most and reduces least."""
    return splits_of(node.body, reference(node)) if node.body is not None else {}


def split_of(choice: Choice, position: int) -> State | None:
    """How a choice splits the operand or result at `position` (`reference`), if it does, and asks for no sum over devices: only a
    loss, which has no dimensions to split, may be one."""
    state = choice.states[position]
    whole = choice.operands if position < len(choice.operands) else choice.states
    return state if state.kind == "P" and PARTIAL not in whole else None


@lru_cache(maxsize=65536)
def splits_of(body: Body, position: int) -> Mapping[int, Choice]:
    """The same of an operator's program, for the operand or result at `position`."""
    found: dict[int, Choice] = {}
    for c in choices(body):
        state = split_of(c, position)
        if state is None or state.outer != 1:
            continue
        best = found.get(state.dim)
        if best is None or _merit(c) > _merit(best):
            found[state.dim] = c
    return found


def _merit(c: Choice) -> tuple[float, int, int]:
    return c.divided, -len(c.reduced), sum(s.kind == "P" for s in c.operands)


def most(node: Node, dim: int) -> int:
    """The largest degree of a dimension; a degree must divide it."""
    found = splits(node).get(dim)
    return 1 if found is None else gcd(found.size, split_shape(node)[dim])


@dataclass(frozen=True)
class Slices:
    """How a tensor is cut: for each of its dimensions the cuts (outer, degree, dimension that the operator splits) of it.

    A cut sees the dimension as [outer, degree, rest]; the part of a piece is its index there. `halos`: for each dimension, how
    many indices before its part and after it a piece needs as well, as far as there are such.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[tuple[int, int, int], ...], ...]
    degrees: Degrees
    halos: tuple[Reach, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """What is asked for as often as these are looked up."""
        return hash((self.shape, self.cuts, self.degrees, self.halos))

    def halo(self, dim: int) -> Reach:
        """Indices before and after each part of a dimension."""
        return self.halos[dim] if self.halos else (0, 0)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of one piece."""
        return tuple(n // prod(degree for _, degree, _ in cuts) for n, cuts in zip(self.shape, self.cuts, strict=True))

    @cached_property
    def slices(self) -> int:
        """How many different ones pieces hold."""
        return prod(degree for cuts in self.cuts for _, degree, _ in cuts)

    @property
    def copied(self) -> bool:
        """Whether several pieces hold the same slice."""
        return prod(self.degrees) > self.slices

    @cached_property
    def slice_of(self) -> NDArray[np.int64]:
        """For every piece, the number of the slice that it holds. Not to be written to."""
        found = np.zeros(prod(self.degrees), np.int64)
        for dim, cuts in enumerate(self.cuts):
            found = found * prod(degree for _, degree, _ in cuts) + self.parts(dim)
        return found

    def parts(self, dim: int) -> NDArray[np.intp]:
        """For every piece, which part of a dimension it has."""
        return _parts(self.degrees, self.cuts[dim])

    @cached_property
    def along(self) -> Mapping[int, Cuts]:
        """By dimension that is cut: how."""
        return {dim: tuple((outer, degree) for outer, degree, _ in cuts) for dim, cuts in enumerate(self.cuts) if cuts}


@lru_cache(maxsize=65536)
def _parts(degrees: Degrees, cuts: tuple[tuple[int, int, int], ...]) -> NDArray[np.intp]:
    """See `Slices.parts`. Not to be written to."""
    index = np.unravel_index(np.arange(prod(degrees)), degrees) if degrees else ()
    found = np.zeros(prod(degrees), np.intp)
    for _, degree, along in cuts:
        found = found * degree + index[along]
    return found


def slices(node: Node, degrees: Degrees, position: int) -> Slices:
    """How an operator's operand or result (positions of results follow operands') is cut if the operator has these degrees."""
    read = position < len(node.operands)
    tensor = node.operands[position].tensor if read else node.tensors[position - len(node.operands)]
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in tensor.shape]
    reach: dict[int, Reach] = {}
    for dim, degree in enumerate(degrees):
        if degree > 1:
            choice = splits(node)[dim]
            state = choice.states[position]
            if state.kind == "P":
                cuts[state.dim].append((state.outer, degree, dim))
                if choice.halos and read and node.body is not None:
                    reach |= _reached(node.body, choice, position)
    whole = ([outer for outer, *_ in found] == [1] for found in cuts)  # then parts are ranges
    halos = tuple(reach.get(dim, (0, 0)) if one else (0, 0) for dim, one in enumerate(whole)) if reach else ()
    return Slices(tensor.shape, tuple(map(tuple, cuts)), degrees, halos)


@lru_cache(maxsize=65536)
def _reached(body: Body, choice: Choice, position: int) -> dict[int, Reach]:
    """How far the windows of a body reach beyond a piece of an operand, by its dimensions.

    What windows slide over may be made of the operand, element by element; then they reach as far in the operand itself.
    """
    found: dict[int, Reach] = {}
    for edge in choice.halos:
        if body.inputs[position] in _alike(body, edge.variable):
            dim, halo = edge.reach.dim, edge.reach.halo
            before, after = found.get(dim, (0, 0))
            found[dim] = (max(before, halo.before), max(after, halo.after))
    return found


def _alike(body: Body, variable: int) -> set[int]:
    """The variables of its shape that a variable is made of, itself included."""
    maker = {v: e for e in body.equations for v in e.results}
    found, stack = {variable}, [variable]
    while stack:
        e = maker.get(stack.pop())
        same = {a for a in (e.operands if e is not None else ()) if isinstance(a, int)} - found
        same = {a for a in same if body.tensors[a].shape == body.tensors[variable].shape}
        found |= same
        stack += same
    return found


def share(node: Node, degrees: Degrees) -> float:
    """The part of an operator's work that one piece is."""
    found = 1.0
    for dim, degree in enumerate(degrees):
        if degree > 1:
            found *= part_of_work(splits(node)[dim].divided, degree)
    return found


class Overlap(NamedTuple):
    """Which pieces of two ways to cut a tensor share elements, and how many."""

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    elements: NDArray[np.int64]


def overlap(a: Slices, b: Slices) -> Overlap:
    """What the pieces of one way to cut a tensor share with those of another: halos are of the second."""
    cut = dict.fromkeys((*a.along, *b.along))
    whole = prod(n for dim, n in enumerate(a.shape) if dim not in cut)
    if not cut:
        shared = np.ones((prod(a.degrees), prod(b.degrees)), np.int64)
    else:
        counts = ((dim, _counts(a.shape[dim], a.along.get(dim, ()), b.along.get(dim, ()), b.halo(dim))) for dim in cut)
        shared = reduce(np.multiply, (count.take(a.parts(dim), 0).take(b.parts(dim), 1) for dim, count in counts))
    first, second = shared.nonzero()
    return Overlap(first, second, whole * shared[first, second])


@lru_cache(maxsize=65536)
def _counts(n: int, a: Cuts, b: Cuts, halo: Reach) -> NDArray[np.int64]:
    """How many indices of a dimension of size n are in each part of one way to cut it and in each, with its halo, of another."""
    unit = 1 if any(halo) else gcd(n, *(n // (outer * degree) for outer, degree in (*a, *b)))  # alike: nothing cuts in between
    first, second = members(n // unit, a), members(n // unit, b)
    k, m = prod(degree for _, degree in a), prod(degree for _, degree in b)
    counts = unit * np.bincount(first * m + second, minlength=k * m).reshape(k, m)
    if any(halo):
        piece = n // m  # halos are of most major cuts, so a part is a range
        for j in range(m):
            outside = (*range(max(j * piece - halo[0], 0), j * piece), *range((j + 1) * piece, min((j + 1) * piece + halo[1], n)))
            counts[:, j] += np.bincount(first[list(outside)], minlength=k)
    return counts


def members(n: int, cuts: Cuts) -> NDArray[np.intp]:
    """For every index of a dimension of size n, which part it is in."""
    index, found = np.arange(n), np.zeros(n, np.intp)
    for outer, degree in cuts:
        found = found * degree + index // (n // (outer * degree)) % degree
    return found
