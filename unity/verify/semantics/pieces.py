"""Tensors and the pieces of them that all devices hold, for many candidates at once, over any domain.

Pieces are stacked: `[*devices, *batch, *local]`, one leading dimension for each axis; whole tensors are `[*batch, *shape]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, Shape, Type, digits, local_shape
from unity.verify.semantics.domains import Array, ElementDomain
from unity.verify.semantics.primitives.core import PLAIN, StackedValue
from unity.verify.semantics.symbolic import Symbolic


def local_indices(shape: Shape, type_: Type, axes: Sequence[Axis], device: Sequence[int]) -> list[Array]:
    """Return for every dimension the indices that a device, given by its coordinates, holds."""
    indices = [np.arange(n) for n in shape]
    for k, d in enumerate(digits(type_, axes)):
        if d is not None:
            i = indices[d.dim]
            indices[d.dim] = i[i // (shape[d.dim] // (d.outer * d.size)) % d.size == device[k]]
    return indices


def join(stack: Array, shape: Shape, type_: Type, axes: Sequence[Axis], domain: ElementDomain) -> Array:
    """Return the whole tensors that pieces represent. Raises ValueError where devices that must hold the same disagree."""
    for k, state in enumerate(type_):
        if state.kind == "S":
            stack = np.expand_dims(domain.total(stack, k), k)
        elif state.kind in "UR":
            if stack.shape[k] > 1 and not (stack == stack.take([0], axis=k)).all():
                raise ValueError(f"devices along {axes[k].name} disagree")
            stack = stack.take([0], axis=k)
    batch = stack.shape[len(axes) : stack.ndim - len(shape)]
    whole = np.empty((*batch, *shape), stack.dtype)
    for device in np.ndindex(*stack.shape[: len(axes)]):
        whole[(..., *np.ix_(*local_indices(shape, type_, axes, device)))] = stack[device]
    return whole


def spread(
    whole: Array, rank: int, type_: Type, axes: Sequence[Axis], domain: ElementDomain, addends: Array | None = None
) -> Array:
    """Return the pieces of whole tensors.

    Args:
        whole: `[*batch, *shape]`.
        rank: the number of dimensions of `shape`.
        type_: of the tensors.
        axes: of the mesh.
        domain: of the elements.
        addends: `[*devices, *whole]`, for a type with partial sums: the addends of all devices but the first, which holds the
            rest of the sum.
    """
    sizes = [a.size for a in axes]
    pieces = np.broadcast_to(whole, (*sizes, *whole.shape))
    for k, state in enumerate(type_):
        if state.kind == "S":
            assert addends is not None
            free = addends.take(range(1, sizes[k]), axis=k)
            for other in range(len(axes)):
                # along axes after k, and along axes before k without a partial sum, the addends are the same
                if other > k or (other < k and type_[other].kind != "S"):
                    free = np.broadcast_to(free.take([0], axis=other), free.shape)
            first = domain.sub(pieces.take([0], axis=k), np.expand_dims(domain.total(free, k), k))
            pieces = np.concatenate([first, free], axis=k)
    return cut(pieces, rank, type_, axes)


def cut(wholes: Array, rank: int, type_: Type, axes: Sequence[Axis]) -> Array:
    """Return the slice that each device holds of a type, from whole tensors `[*devices, *batch, *whole]` on all devices."""
    shape, lead = wholes.shape[wholes.ndim - rank :], wholes.shape[: wholes.ndim - rank]
    stack = np.empty((*lead, *local_shape(shape, type_, axes)), wholes.dtype)
    for device in np.ndindex(*lead[: len(axes)]):
        stack[device] = wholes[device][(..., *np.ix_(*local_indices(shape, type_, axes, device)))]
    return stack


def symbolic_pieces(
    value: StackedValue, type_: Type, axes: tuple[Axis, ...], domain: Symbolic, name: str, rng: np.random.Generator
) -> Array:
    """Return the pieces of a whole value. Addends of partial sums are fresh symbols, or random if the value is concrete."""
    addends, shape = None, (*(a.size for a in axes), *value.array.shape)
    if PARTIAL in type_:
        addends = rng.integers(-4, 5, shape).astype(value.array.dtype) if value.known else domain.symbols(f"{name}@", shape)
    return spread(value.array, value.array.ndim, type_, axes, PLAIN if value.known else domain, addends)


def sum_partial(pieces: Array, type_: Type, known: bool, domain: Symbolic) -> Array:
    """Return pieces `[*devices, *piece]` with partial sums reduced, on every device."""
    for i, state in enumerate(type_):
        if state == PARTIAL:
            total = np.sum(pieces, i, dtype=pieces.dtype) if known else domain.total(pieces, i)
            pieces = np.broadcast_to(np.expand_dims(total, i), pieces.shape)
    return pieces
