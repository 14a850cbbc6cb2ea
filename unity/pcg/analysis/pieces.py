"""Pieces of one argument, such as the weights of layers written out: `layer(ws[1], layer(ws[0], x))`.

Pieces belong to no layer, so that layers which differ in the number of theirs alone are equal, and rolled into a scan they walk
over the array itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.ir.program import Body, Equation

LEAST = 4  # pieces of one array: fewer are parts of what one layer reads


@dataclass(frozen=True)
class Piece:
    """The part `array[start:limit]` of an argument, or of a cast of one, without some dimensions, which have one element in it.

    equations: the numbers of those that compute it.
    """

    array: int
    start: tuple[int, ...]
    limit: tuple[int, ...]
    squeezed: tuple[int, ...]
    equations: tuple[int, ...]

    @property
    def kind(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """What the pieces of a stack have in common: the array, their shape in it, and the dimensions that they are without."""
        return self.array, tuple(b - a for a, b in zip(self.start, self.limit, strict=True)), self.squeezed


@dataclass(frozen=True)
class Stack:
    """As many pieces of an array as `count`, at consecutive places along a dimension from the first one's."""

    first: Piece
    dim: int
    count: int

    @property
    def array(self) -> int:
        """The variable of the whole array."""
        return self.first.array

    def of(self, array: jax.Array) -> jax.Array:
        """Return the stacked pieces."""
        limit = tuple(n + self.count - 1 if dim == self.dim else n for dim, n in enumerate(self.first.limit))
        if self.first.start != (0,) * array.ndim or limit != array.shape:
            array = lax.slice(array, self.first.start, limit)
        stacked = jnp.moveaxis(array, self.dim, 0) if self.dim else array
        others = tuple(dim + 1 if dim < self.dim else dim for dim in self.first.squeezed if dim != self.dim)
        return lax.squeeze(stacked, others) if others else stacked


def pieces(body: Body) -> dict[int, Piece]:
    """Return the variables of a program that are pieces of an argument with at least `LEAST` of their kind."""
    arrays: dict[int, tuple[int, tuple[int, ...]]] = {
        v: (v, ()) for v in body.inputs
    }  # or casts: the first equal one, and equations
    casts: dict[tuple[int, str], int] = {}
    cut: dict[int, tuple[int, Equation, int]] = {}  # the slices: of which of these, and where
    found: dict[int, Piece] = {}
    for k, e in enumerate(body.equations):
        if len(e.operands) != 1 or not isinstance(v := e.operands[0], int):
            continue
        if e.name == "convert_element_type" and v in arrays:
            array, equations = arrays[v]
            arrays[e.results[0]] = casts.setdefault((array, e.signature), e.results[0]), (*equations, k)
        elif e.name == "slice" and v in arrays and e.params["strides"] is None:
            cut[e.results[0]] = v, e, k
        elif e.name == "squeeze" and v in cut:
            (whole, slicing, i), dims = cut[v], tuple(e.params["dimensions"])
            array, equations = arrays[whole]
            start, limit = tuple(slicing.params["start_indices"]), tuple(slicing.params["limit_indices"])
            found[e.results[0]] = Piece(array, start, limit, dims, (*equations, i, k))
    count = Counter(piece.kind for piece in found.values())
    return {v: piece for v, piece in found.items() if count[piece.kind] >= LEAST}


def stack_of(some: Sequence[Piece]) -> Stack | None:
    """Return pieces as one stack, in their order, or None if they are no consecutive pieces of one array."""
    first = some[0]
    for dim in first.squeezed:
        if all(_shifted(first, dim, k) == replace(piece, equations=first.equations) for k, piece in enumerate(some)):
            return Stack(first, dim, len(some))
    return None


def _shifted(piece: Piece, dim: int, by: int) -> Piece:
    def shifted(places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n + by if k == dim else n for k, n in enumerate(places))

    return replace(piece, start=shifted(piece.start), limit=shifted(piece.limit))
