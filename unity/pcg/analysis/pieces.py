"""Pieces of one argument, such as the weights of layers written out: `layer(ws[1], layer(ws[0], x))`.

If pieces belong to no layer, layers that differ in the index of theirs alone are equal, and rolled into a scan they walk over the
array itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.ir.program import Body, Equation

LEAST = 4  # pieces of a kind: fewer are parts of what one layer reads


@dataclass(frozen=True)
class ArrayPiece:
    """The part `array[start:limit]` of an argument, or of a cast of one, without some dimensions, which have one element in it.

    Attributes:
        array: the variable; of equal casts the first.
        start, limit: the part, with one number for each dimension of the array.
        squeezed: the dimensions that the piece does not have.
        equations: the numbers of those that compute the piece, and `array` where that is a cast.
    """

    array: int
    start: tuple[int, ...]
    limit: tuple[int, ...]
    squeezed: tuple[int, ...]
    equations: tuple[int, ...]

    @property
    def kind(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """The key that all pieces of a stack share: the array, their shape in it, and the dimensions that were squeezed out."""
        return self.array, tuple(b - a for a, b in zip(self.start, self.limit, strict=True)), self.squeezed


@dataclass(frozen=True)
class Stack:
    """As many pieces of an array as `count`, along a dimension from the first one's place, every `step`th."""

    first: ArrayPiece
    dim: int
    step: int
    count: int

    @property
    def array(self) -> int:
        """The variable of the whole array."""
        return self.first.array

    def of(self, array: jax.Array) -> jax.Array:
        """Return the stacked pieces."""
        stacked = jnp.moveaxis(self._cut(array), self.dim, 0) if self.dim else self._cut(array)
        others = tuple(dim + 1 if dim < self.dim else dim for dim in self.first.squeezed if dim != self.dim)
        return lax.squeeze(stacked, others) if others else stacked

    def _cut(self, array: jax.Array) -> jax.Array:
        """Return the part of the array that the pieces fill, without what is between them."""
        dim, step, place = self.dim, self.step, self.first.start[self.dim]
        offset = place % step
        low = place - offset
        if low + self.count * step > array.shape[dim]:  # no whole steps
            strides = [step if k == dim else 1 for k in range(array.ndim)]
            return lax.slice(array, self.first.start, self._limit(place + (self.count - 1) * step + 1), strides)
        start, limit = self._with(self.first.start, low), self._limit(low + self.count * step)
        if start != (0,) * array.ndim or limit != array.shape:
            array = lax.slice(array, start, limit)
        if step == 1:
            return array
        steps = array.reshape(*array.shape[:dim], self.count, step, *array.shape[dim + 1 :])  # which devices can divide
        return lax.index_in_dim(steps, offset, dim + 1, keepdims=False)

    def _limit(self, limit: int) -> tuple[int, ...]:
        return self._with(self.first.limit, limit)

    def _with(self, places: tuple[int, ...], place: int) -> tuple[int, ...]:
        return tuple(place if k == self.dim else n for k, n in enumerate(places))


def pieces(body: Body) -> dict[int, ArrayPiece]:
    """Return the variables of a program that are pieces of an argument with at least `LEAST` of their kind."""
    readers = [body.outputs, *(e.operands for e in body.equations if e.name != "slice")]
    read_whole = {a for atoms in readers for a in atoms if isinstance(a, int)}
    arrays: dict[int, int] = {v: v for v in body.inputs}  # arguments and their casts, each with the first that is equal
    casting: dict[int, tuple[int, ...]] = {v: () for v in body.inputs}  # the equations of these
    first: dict[tuple[int, str], int] = {}
    slices: dict[int, tuple[int, Equation, int]] = {}  # results, each with the variable that is cut and the equation
    all_pieces: dict[int, ArrayPiece] = {}
    for k, e in enumerate(body.equations):
        if len(e.operands) != 1 or not isinstance(v := e.operands[0], int):
            continue
        if e.name == "convert_element_type" and v in arrays and read_whole.isdisjoint(e.results):
            (cast,) = e.results
            arrays[cast] = first.setdefault((arrays[v], e.signature), cast)
            casting[cast] = (*casting[v], k, *casting.get(arrays[cast], ()))
        elif e.name == "slice" and v in arrays and e.params["strides"] is None:
            slices[e.results[0]] = v, e, k
        elif e.name == "squeeze" and v in slices:
            (whole, cut, i), dims = slices[v], tuple(e.params["dimensions"])
            start, limit = tuple(cut.params["start_indices"]), tuple(cut.params["limit_indices"])
            all_pieces[e.results[0]] = ArrayPiece(arrays[whole], start, limit, dims, (*casting[whole], i, k))
    count = Counter(piece.kind for piece in all_pieces.values())
    return {v: piece for v, piece in all_pieces.items() if count[piece.kind] >= LEAST}


def stack_of(members: Sequence[ArrayPiece]) -> Stack | None:
    """Return pieces as one stack, in their order; None if they are fewer than two or not equally far apart."""
    if len(members) < 2:
        return None
    first, second = members[:2]
    for dim in first.squeezed:
        step = second.start[dim] - first.start[dim]
        evenly_apart = [_shifted(first, dim, step * k) for k in range(len(members))]
        if step > 0 and evenly_apart == [replace(piece, equations=first.equations) for piece in members]:
            return Stack(first, dim, step, len(members))
    return None


def _shifted(piece: ArrayPiece, dim: int, by: int) -> ArrayPiece:
    def shifted(places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n + by if k == dim else n for k, n in enumerate(places))

    return replace(piece, start=shifted(piece.start), limit=shifted(piece.limit))
