"""Parallelization operators inside `shard_map`: one collective each, whose transpose is the dual operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.local.widening import sent
from unity.pcg.operators.layout import outer_here, take_digit
from unity.pcg.parallel.resharding import ReshardingStep
from unity.pcg.types.accumulation import backward_dtype, forward_dtype, is_wide_sum, storage_dtype
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Digit, digits
from unity.pcg.types.varying_axes import aligned, common, position_along, vary, varying


def apply(step: ReshardingStep, x: jax.Array, axes: tuple[Axis, ...], dtype: Any = None) -> jax.Array:
    """Run one parallelization operator on a local piece.

    Args:
        step: the operator.
        x: the piece.
        axes: the mesh.
        dtype: the tensor's element type; by default the piece's. `unity.pcg.types.accumulation` defines in which types the piece
            is stored and sent.
    """
    dtype = x.dtype if dtype is None else dtype
    there, back = forward_dtype(dtype, step.before, axes), backward_dtype(dtype, step.after, axes)
    result, summed = storage_dtype(dtype, step.after, axes), is_wide_sum(dtype, step.after, axes)
    if {x.dtype, there, back, result} == {dtype}:
        return _run(step, x, axes)
    return sent(lambda x: _run(step, x, axes), x, there, back, dtype, result, not summed)


def _run(step: ReshardingStep, x: jax.Array, axes: tuple[Axis, ...]) -> jax.Array:
    """Run the collective of a parallelization operator, in the piece's own element type."""
    names = tuple(axes[i].name for i in step.axes)
    if step.kind == "replicate":
        return vary(x, names)
    if step.kind == "unreplicate":
        return _unreplicate(x, names)
    if step.kind == "reduce":
        return lax.psum(x, names)
    if step.kind == "contribute":
        return _contribute(x, step, axes)
    old, new = digits(step.before, axes), digits(step.after, axes)
    if step.kind == "partition":
        return _partition(x, step, axes)
    if step.kind == "reduce_partition":
        cut_digits = [d for i in step.axes if (d := new[i]) is not None]
        return _scatter(x, names, cut_digits, _others(old, step.axes))
    if step.kind in ("combine", "combine_replicate"):
        joined = [d for i in step.axes if (d := old[i]) is not None]
        return _gather(x, names, joined, _others(new, step.axes), "invarying" if step.kind == "combine" else "varying")
    cut_digits, joined = [d for i in step.axes if (d := new[i]) is not None], [d for i in step.axes if (d := old[i]) is not None]
    return _exchange(x, names, joined, cut_digits, _others(old, step.axes))


# In the functions below, `here` are the digits at which the local piece is already cut, and stays so; `cut_digits` are those at
# which a collective cuts it; `joined` are those along which a collective joins pieces.


def _others(per_axis: Sequence[Digit | None], excluded: Sequence[int]) -> list[Digit]:
    """Return the digits of all axes but the excluded ones."""
    return [d for i, d in enumerate(per_axis) if d is not None and i not in excluded]


def _partition(x: jax.Array, step: ReshardingStep, axes: tuple[Axis, ...]) -> jax.Array:
    """Slice a whole value. The gradient of an *unused* one is gathered; that of a *replicated* one is a partial sum, and padded."""
    old, new = digits(step.before, axes), digits(step.after, axes)
    here = _others(old, step.axes)
    for kind in ("R", "U"):
        chosen = [i for i in step.axes if step.before[i].kind == kind]
        names, cut_digits = tuple(axes[i].name for i in chosen), [d for i in chosen if (d := new[i]) is not None]
        if not chosen:
            continue
        take_slice = _slice if kind == "R" else _slice_unused
        x = take_slice(x, names, tuple(cut_digits), tuple(here))
        here = here + cut_digits
    return x


def _slice(x: jax.Array, names: Sequence[str], cut_digits: Sequence[Digit], here: Sequence[Digit]) -> jax.Array:
    """Return this device's slice at each digit, one mesh axis for each."""
    done = list(here)
    for name, digit in zip(names, cut_digits, strict=True):
        x = take_digit(x, digit, position_along(name), done)
        done.append(digit)
    return x


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _slice_unused(x: jax.Array, names: tuple[str, ...], cut_digits: tuple[Digit, ...], here: tuple[Digit, ...]) -> jax.Array:
    """Slice a value that is the same on every device. Its gradient is gathered."""
    return _slice(x, names, cut_digits, here)


def _slice_forward(x: jax.Array, names: Any, cut_digits: Any, here: Any) -> tuple[jax.Array, None]:
    return _slice(x, names, cut_digits, here), None


def _slice_backward(names: Any, cut_digits: Any, here: Any, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (_gather(g, names, cut_digits, here, "invarying"),)


_slice_unused.defvjp(_slice_forward, _slice_backward)


def _contribute(x: jax.Array, step: ReshardingStep, axes: tuple[Axis, ...]) -> jax.Array:
    """Turn a value into a partial sum, of the first device's value and zeros, or of each device's piece among zeros."""
    old = digits(step.before, axes)
    names = tuple(axes[i].name for i in step.axes if step.before[i].kind in "UR")
    x = contribute(x, names) if names else x
    moved = [(axes[i].name, d) for i in step.axes if (d := old[i]) is not None]
    return _among_zeros(x, moved, _others(old, step.axes)) if moved else x


def contribute(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Turn a whole value into a partial sum along axes: the first device keeps it, the others have zeros."""
    differing = tuple(n for n in names if n in varying(x))
    same = tuple(n for n in names if n not in differing)
    x = _first_of_unused(x, same) if same else x
    return _first(x, differing) if differing else x


def _first(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Return the value on the first device along the axes, and zeros on the others."""
    first = jnp.all(jnp.stack([position_along(name) == 0 for name in names]))
    return lax.select_n(*aligned([first, jnp.zeros_like(x), x]))


def _among_zeros(x: jax.Array, moved: Sequence[tuple[str, Digit]], here: Sequence[Digit]) -> jax.Array:
    """Return the tensor with this device's piece in its place, and zeros in the places of the others.

    Args:
        x: the piece.
        moved: the axes along which it is a piece, by name, each with its digit.
        here: the digits at which the result is cut, too.
    """
    digits_ = [d for _, d in moved]
    mine = jnp.ones((), bool)
    for k, (name, digit) in enumerate(moved):
        shape = [digit.size if j == k else 1 for j in range(len(moved))]
        places = jnp.arange(digit.size, dtype=jnp.int32).reshape(shape)
        mine = jnp.logical_and(*aligned([mine, jnp.equal(*aligned([places, position_along(name)]))]))
    count = mine.size
    whole = jnp.broadcast_to(mine.reshape(count, *(1 for _ in x.shape)), (count, *x.shape))
    pieces = jnp.broadcast_to(x, (count, *x.shape))
    return put(lax.select_n(*aligned([whole, jnp.zeros_like(pieces), pieces])), digits_, here)


# The cotangent of a value that is the same on every device is that of one device. So these two are transposes of each other.


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _unreplicate(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Turn a replicated value into an unused one, of which JAX knows that it is the same along the axes."""
    return common(vary(x, names), names)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _first_of_unused(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Turn an unused value into a partial sum."""
    return _first(x, names)


_unreplicate.defvjp(lambda x, names: (_unreplicate(x, names), None), lambda names, _, g: (_first_of_unused(g, names),))
_first_of_unused.defvjp(lambda x, names: (_first_of_unused(x, names), None), lambda names, _, g: (_unreplicate(g, names),))


def _contiguous(moved: Sequence[Digit]) -> int | None:
    """Return the dimension whose most major digits are exactly those moved, in order, or None.

    JAX's tiled collectives apply to such a dimension.
    """
    outer = 1
    for d in moved:
        if d.dim != moved[0].dim or d.outer != outer:
            return None
        outer *= d.size
    return moved[0].dim


def _gather(x: jax.Array, names: Sequence[str], joined: Sequence[Digit], here: Sequence[Digit], to: str) -> jax.Array:
    """Join the pieces of all devices along the digits of the axes, by an all-gather."""
    dim = _contiguous(joined)
    if dim is not None:
        return lax.all_gather(x, tuple(names), axis=dim, tiled=True, to=to)
    # Along a new dimension, tiled: JAX cannot lower an untiled one for PRNG keys.
    return put(lax.all_gather(x[None], tuple(names), axis=0, tiled=True, to=to), joined, here)


def _scatter(x: jax.Array, names: Sequence[str], cut_digits: Sequence[Digit], here: Sequence[Digit]) -> jax.Array:
    """Return this device's piece of the sum over the axes, by a reduce-scatter."""
    dim = _contiguous(cut_digits)
    if dim is not None:
        return lax.psum_scatter(x, tuple(names), scatter_dimension=dim, tiled=True)
    return lax.psum_scatter(cut(x, cut_digits, here), tuple(names), scatter_dimension=0, tiled=False)


def _exchange(
    x: jax.Array, names: Sequence[str], joined: Sequence[Digit], cut_digits: Sequence[Digit], here: Sequence[Digit]
) -> jax.Array:
    """Cut a piece at new digits and join it at old ones, by an all-to-all.

    XLA's CPU backend may give the parts that it cuts for each device different layouts, and then refuses to exchange them. A
    barrier before the exchange prevents that; the one after it does so for the exchange of cotangents, which goes the other way.
    """
    x = lax.optimization_barrier(x)
    old, new = _contiguous(joined), _contiguous(cut_digits)
    if old is not None and new is not None and old != new:
        return lax.optimization_barrier(lax.all_to_all(x, tuple(names), split_axis=new, concat_axis=old, tiled=True))
    pieces = lax.all_to_all(cut(x, cut_digits, [*here, *joined]), tuple(names), split_axis=0, concat_axis=0, tiled=True)
    return put(lax.optimization_barrier(pieces), joined, [*here, *cut_digits])


def _segments(n: int, moved: Sequence[Digit], here: Sequence[Digit], whole: bool) -> list[int]:
    """Return the sizes of one dimension of a local piece split as [before, digit, between, digit, ..., after].

    Args:
        n: the size of the dimension.
        moved: the digits, in the order of the dimension.
        here: further digits at which the piece is cut.
        whole: whether the piece has all indices of each digit; otherwise it has one, and the sizes of the digits are left out.
    """
    sizes, before = [], 1
    for d in sorted(moved, key=lambda d: d.outer):
        outer = outer_here(d, [*here, *(m for m in moved if m.outer < d.outer)])
        sizes += [outer // before, d.size] if whole else [outer // before]
        before = outer
    return [*sizes, n // (before * (prod(d.size for d in moved) if whole else 1))]


def _views(shape: Sequence[int], moved: Sequence[Digit], here: Sequence[Digit], whole: bool) -> tuple[list[int], list[int]]:
    """Return a shape split at every moved digit (`_segments`), and the positions of the digits in the order of `moved`."""
    view: list[int] = []
    position: dict[Digit, int] = {}
    for dim, n in enumerate(shape):
        mine = sorted((d for d in moved if d.dim == dim), key=lambda d: d.outer)
        others = [d for d in here if d.dim == dim]
        for k, d in enumerate(mine):
            position[d] = len(view) + (2 * k + 1 if whole else k + 1)
        view += _segments(n, mine, others, whole)
    return view, [position[d] for d in moved]


def cut(x: jax.Array, cut_digits: Sequence[Digit], here: Sequence[Digit]) -> jax.Array:
    """Return the pieces into which digits split `x`, the first digit most major. Shape `[product of digit sizes, *piece]`."""
    view, places = _views(x.shape, cut_digits, here, whole=True)
    rest = [i for i in range(len(view)) if i not in places]
    shape = list(x.shape)
    for d in cut_digits:
        shape[d.dim] //= d.size
    return x.reshape(view).transpose(*places, *rest).reshape(prod(d.size for d in cut_digits), *shape)


def put(pieces: jax.Array, joined: Sequence[Digit], here: Sequence[Digit]) -> jax.Array:
    """Return the tensor that `cut` splits into these pieces."""
    local = pieces.shape[1:]
    view, places = _views(local, joined, here, whole=False)
    x = pieces.reshape(*(d.size for d in joined), *view)
    k = len(joined)
    order: list[int] = []
    for i in range(len(view)):
        # digits that belong before segment i; `places` counts segments that come before a digit
        order += [t for t, place in enumerate(places) if place == i]
        order.append(k + i)
    shape = list(local)
    for d in joined:
        shape[d.dim] *= d.size
    return x.transpose(order).reshape(shape)
