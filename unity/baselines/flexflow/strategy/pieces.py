"""The pieces of an operator whose output dimensions are split (FlexFlow, section 4), derived from the operator table.

A dimension of an operator's first result can be split if one of the operator's choices along an axis partitions the result there.
That choice also tells which slice of each operand a piece needs, how much of the neighbouring slices (halos), which part of the
work it does, and what must be reduced over the pieces. A result without dimensions, such as a loss, is the sum of the contributions
of the largest operand's pieces. Dimensions are split independently, each into equal parts; pieces are numbered in row-major order.
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
from unity.pcg.propagation.choice import Choice, part_of_work
from unity.pcg.propagation.choices import choices
from unity.pcg.types.parallel_type import PARTIAL, State

Degrees = tuple[int, ...]
Reach = tuple[int, int]  # indices before a part, and after it
Cuts = tuple[tuple[int, int], ...]  # of a dimension: outer, degree (`Slices`)


def reference(node: Node) -> int:
    """Return the position of the operand or result whose dimensions are split. Positions of results follow those of operands."""
    n = len(node.operands)
    return n if node.tensors[0].shape or not n else max(range(n), key=lambda p: node.operands[p].tensor.nbytes)


def split_shape(node: Node) -> tuple[int, ...]:
    """Return the dimensions for which degrees are given."""
    position, n = reference(node), len(node.operands)
    return node.operands[position].tensor.shape if position < n else node.tensors[position - n].shape


def splits(node: Node) -> Mapping[int, Choice]:
    """Return the dimensions that can be split, and for each the choice that divides most work and, among equals, reduces least."""
    return splits_of(node.body, reference(node)) if node.body is not None else {}


def split_of(choice: Choice, position: int) -> State | None:
    """Return the state into which a choice splits the operand or result at `position` (see `reference`), or None.

    It is None if the choice does not split it, or needs a sum over devices. Only a loss, which has no dimensions, may be a sum.
    """
    state = choice.states[position]
    whole = choice.operands if position < len(choice.operands) else choice.states
    return state if state.kind == "P" and PARTIAL not in whole else None


@lru_cache(maxsize=65536)
def splits_of(body: Body, position: int) -> Mapping[int, Choice]:
    """Return `splits` of an operator's program, for the operand or result at `position`."""
    best_choices: dict[int, Choice] = {}
    for c in choices(body):
        state = split_of(c, position)
        if state is None or state.outer != 1:
            continue
        best = best_choices.get(state.dim)
        if best is None or _merit(c) > _merit(best):
            best_choices[state.dim] = c
    return best_choices


def _merit(c: Choice) -> tuple[float, int, int]:
    return c.divided, -len(c.reduced), sum(s.kind == "P" for s in c.operands)


def largest_degree(node: Node, dim: int) -> int:
    """Return the largest degree of a dimension. Every degree must divide it."""
    choice = splits(node).get(dim)
    return 1 if choice is None else gcd(choice.size, split_shape(node)[dim])


@dataclass(frozen=True)
class Slices:
    """The way in which a tensor is cut: for each of its dimensions, cuts (outer, degree, dimension that the operator splits).

    A cut sees the dimension as [outer, degree, rest]; a piece's part is its index in the middle. `halos` gives for each dimension
    how many indices before and after its part a piece needs as well, as far as they exist.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[tuple[int, int, int], ...], ...]
    degrees: Degrees
    halos: tuple[Reach, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, computed once: slices are dictionary keys in inner loops."""
        return hash((self.shape, self.cuts, self.degrees, self.halos))

    def halo(self, dim: int) -> Reach:
        """Return the indices before and after each part of a dimension."""
        return self.halos[dim] if self.halos else (0, 0)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of one piece."""
        return tuple(n // prod(degree for _, degree, _ in cuts) for n, cuts in zip(self.shape, self.cuts, strict=True))

    @cached_property
    def slices(self) -> int:
        """The number of different slices."""
        return prod(degree for cuts in self.cuts for _, degree, _ in cuts)

    @property
    def copied(self) -> bool:
        """Whether several pieces have the same slice."""
        return prod(self.degrees) > self.slices

    @cached_property
    def slice_of(self) -> NDArray[np.int64]:
        """For every piece, the number of its slice. Do not write to it."""
        numbers = np.zeros(prod(self.degrees), np.int64)
        for dim, cuts in enumerate(self.cuts):
            numbers = numbers * prod(degree for _, degree, _ in cuts) + self.parts(dim)
        return numbers

    def parts(self, dim: int) -> NDArray[np.intp]:
        """Return for every piece which part of a dimension it has."""
        return _parts(self.degrees, self.cuts[dim])

    @cached_property
    def along(self) -> Mapping[int, Cuts]:
        """For each dimension that is cut, its cuts as (outer, degree)."""
        return {dim: tuple((outer, degree) for outer, degree, _ in cuts) for dim, cuts in enumerate(self.cuts) if cuts}


@lru_cache(maxsize=65536)
def _parts(degrees: Degrees, cuts: tuple[tuple[int, int, int], ...]) -> NDArray[np.intp]:
    """Compute `Slices.parts`. Do not write to the result."""
    index = np.unravel_index(np.arange(prod(degrees)), degrees) if degrees else ()
    parts = np.zeros(prod(degrees), np.intp)
    for _, degree, along in cuts:
        parts = parts * degree + index[along]
    return parts


def slices(node: Node, degrees: Degrees, position: int) -> Slices:
    """Return how the operand or result at a position (see `reference`) is cut if the operator has these degrees."""
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
    contiguous = ([outer for outer, *_ in own] == [1] for own in cuts)
    halos = tuple(reach.get(dim, (0, 0)) if is_range else (0, 0) for dim, is_range in enumerate(contiguous)) if reach else ()
    return Slices(tensor.shape, tuple(map(tuple, cuts)), degrees, halos)


@lru_cache(maxsize=65536)
def _reached(body: Body, choice: Choice, position: int) -> dict[int, Reach]:
    """Return how far the windows of a body reach beyond a piece of an operand, for each of its dimensions.

    Windows may slide over a value that is computed element by element from the operand; they reach as far in the operand itself.
    """
    reach: dict[int, Reach] = {}
    for edge in choice.halos:
        if body.inputs[position] in _alike(body, edge.variable):
            dim, halo = edge.reach.dim, edge.reach.halo
            before, after = reach.get(dim, (0, 0))
            reach[dim] = (max(before, halo.before), max(after, halo.after))
    return reach


def _alike(body: Body, variable: int) -> set[int]:
    """Return the variables of equal shape from which a variable is computed, itself included."""
    producers = {v: e for e in body.equations for v in e.results}
    variables, stack = {variable}, [variable]
    while stack:
        e = producers.get(stack.pop())
        same = {a for a in (e.operands if e is not None else ()) if isinstance(a, int)} - variables
        same = {a for a in same if body.tensors[a].shape == body.tensors[variable].shape}
        variables |= same
        stack += same
    return variables


def share(node: Node, degrees: Degrees) -> float:
    """Return the fraction of an operator's work that one piece does."""
    fraction = 1.0
    for dim, degree in enumerate(degrees):
        if degree > 1:
            fraction *= part_of_work(splits(node)[dim].divided, degree)
    return fraction


class Overlap(NamedTuple):
    """Pairs of pieces of two ways to cut a tensor that share elements, and how many they share."""

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    elements: NDArray[np.int64]


def overlap(a: Slices, b: Slices) -> Overlap:
    """Return what the pieces of one way to cut a tensor share with those of another. Halos are those of the second."""
    cut = dict.fromkeys((*a.along, *b.along))
    uncut = prod(n for dim, n in enumerate(a.shape) if dim not in cut)
    if not cut:
        shared = np.ones((prod(a.degrees), prod(b.degrees)), np.int64)
    else:
        counts = ((dim, _counts(a.shape[dim], a.along.get(dim, ()), b.along.get(dim, ()), b.halo(dim))) for dim in cut)
        shared = reduce(np.multiply, (count.take(a.parts(dim), 0).take(b.parts(dim), 1) for dim, count in counts))
    first, second = shared.nonzero()
    return Overlap(first, second, uncut * shared[first, second])


@lru_cache(maxsize=65536)
def _counts(n: int, a: Cuts, b: Cuts, halo: Reach) -> NDArray[np.int64]:
    """Count the indices that parts of a dimension share.

    There is a row for each part of the first way to cut it, and a column for each part, with its halo, of the second.
    """
    # indices in one unit are never separated
    unit = 1 if any(halo) else gcd(n, *(n // (outer * degree) for outer, degree in (*a, *b)))
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
    """Return for every index of a dimension of size n which part it is in."""
    index, parts = np.arange(n), np.zeros(n, np.intp)
    for outer, degree in cuts:
        parts = parts * degree + index // (n // (outer * degree)) % degree
    return parts
