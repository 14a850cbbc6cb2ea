"""Between whole tensors and what all devices hold of them, many candidates at once, in any domain.

Pieces are stacked: `[*devices, *batch, *local]`, one leading dimension for each axis; wholes are `[*batch, *shape]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Shape, Type, digits, local_shape
from unity.verify.semantics.domains import Array, Domain


def indices(shape: Shape, type_: Type, axes: Sequence[Axis], at: Sequence[int]) -> list[Array]:
    """For every dimension, which of its indices a device holds."""
    kept = [np.arange(n) for n in shape]
    for k, d in enumerate(digits(type_, axes)):
        if d is not None:
            i = kept[d.dim]
            kept[d.dim] = i[i // (shape[d.dim] // (d.outer * d.size)) % d.size == at[k]]
    return kept


def join(stack: Array, shape: Shape, type_: Type, axes: Sequence[Axis], domain: Domain) -> Array:
    """The tensors that pieces stand for. Raises ValueError where devices disagree that must hold the same."""
    for k, state in enumerate(type_):
        if state.kind == "S":
            stack = np.expand_dims(domain.total(stack, k), k)
        elif state.kind in "UR":
            if stack.shape[k] > 1 and not (stack == stack.take([0], axis=k)).all():
                raise ValueError(f"devices along {axes[k].name} disagree")
            stack = stack.take([0], axis=k)
    batch = stack.shape[len(axes) : stack.ndim - len(shape)]
    whole = np.empty((*batch, *shape), stack.dtype)
    for at in np.ndindex(*stack.shape[: len(axes)]):
        whole[(..., *np.ix_(*indices(shape, type_, axes, at)))] = stack[at]
    return whole


def spread(whole: Array, rank: int, type_: Type, axes: Sequence[Axis], domain: Domain, parts: Array | None = None) -> Array:
    """The pieces of tensors. Of a partial sum, all devices but the first hold `parts`, `[*devices, *whole]`, as they are."""
    sizes = [a.size for a in axes]
    held = np.broadcast_to(whole, (*sizes, *whole.shape))
    for k, state in enumerate(type_):
        if state.kind == "S":
            assert parts is not None
            free = parts.take(range(1, sizes[k]), axis=k)
            for other in range(k, len(axes)):
                if other != k:  # what follows is put in later; what is no partial sum is the same on all devices
                    free = np.broadcast_to(free.take([0], axis=other), free.shape)
            for other in range(k):
                if type_[other].kind != "S":
                    free = np.broadcast_to(free.take([0], axis=other), free.shape)
            first = domain.sub(held.take([0], axis=k), np.expand_dims(domain.total(free, k), k))
            held = np.concatenate([first, free], axis=k)
    return cut(held, rank, type_, axes)


def cut(held: Array, rank: int, type_: Type, axes: Sequence[Axis]) -> Array:
    """Of whole tensors on every device, `[*devices, *batch, *whole]`, the pieces that the type leaves to each."""
    shape, lead = held.shape[held.ndim - rank :], held.shape[: held.ndim - rank]
    stack = np.empty((*lead, *local_shape(shape, type_, axes)), held.dtype)
    for at in np.ndindex(*lead[: len(axes)]):
        stack[at] = held[at][(..., *np.ix_(*indices(shape, type_, axes, at)))]
    return stack
