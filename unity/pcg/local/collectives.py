"""The parallelization operators as they run inside `shard_map`: one collective each, and its dual backward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.local.widening import sent
from unity.pcg.operators.layout import outer_here, take_digit
from unity.pcg.parallel.resharding import Step
from unity.pcg.types.accumulation import backward, forward, held
from unity.pcg.types.accumulation import partial as is_partial
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Digit, digits
from unity.pcg.types.varying_axes import aligned, common, vary, varying


def apply(step: Step, x: jax.Array, axes: tuple[Axis, ...], dtype: Any = None) -> jax.Array:
    """Runs one parallelization operator on a local piece of a tensor of a type (default: the piece's own), which travels as
    `pcg.accumulation` says."""
    dtype = x.dtype if dtype is None else dtype
    there, back = forward(dtype, step.before, axes), backward(dtype, step.after, axes)
    result, summed = held(dtype, step.after, axes), is_partial(dtype, step.after, axes)
    if {x.dtype, there, back, result} == {dtype}:
        return _moved(step, x, axes)
    return sent(lambda x: _moved(step, x, axes), x, there, back, dtype, result, not summed)


def _moved(step: Step, x: jax.Array, axes: tuple[Axis, ...]) -> jax.Array:
    names = tuple(axes[i].name for i in step.axes)
    if step.kind == "replicate":
        return vary(x, names)
    if step.kind == "unreplicate":
        return _same(x, names)
    if step.kind == "reduce":
        return lax.psum(x, names)
    if step.kind == "contribute":
        return _contribute(x, step, axes)
    old, new = digits(step.before, axes), digits(step.after, axes)
    if step.kind == "partition":
        return _partition(x, step, axes)
    if step.kind == "reduce_partition":
        given = [d for i in step.axes if (d := new[i]) is not None]
        return _scatter(x, names, given, _others(old, step.axes))
    if step.kind in ("combine", "combine_replicate"):
        taken = [d for i in step.axes if (d := old[i]) is not None]
        return _gather(x, names, taken, _others(new, step.axes), "invarying" if step.kind == "combine" else "varying")
    given, taken = [d for i in step.axes if (d := new[i]) is not None], [d for i in step.axes if (d := old[i]) is not None]
    return _exchange(x, names, taken, given, _others(old, step.axes))


def _others(found: Sequence[Digit | None], but: Sequence[int]) -> list[Digit]:
    return [d for i, d in enumerate(found) if d is not None and i not in but]


def _partition(x: jax.Array, step: Step, axes: tuple[Axis, ...]) -> jax.Array:
    """Slices. From *unused*, the gradient is gathered; from *replicated* it is a partial sum already, and is padded."""
    old, new = digits(step.before, axes), digits(step.after, axes)
    here = _others(old, step.axes)
    for kind in ("R", "U"):
        chosen = [i for i in step.axes if step.before[i].kind == kind]
        names, given = tuple(axes[i].name for i in chosen), [d for i in chosen if (d := new[i]) is not None]
        if not chosen:
            continue
        slices = _slices if kind == "R" else _slice_unused
        x = slices(x, names, tuple(given), tuple(here))
        here = here + given
    return x


def _slices(x: jax.Array, names: Sequence[str], given: Sequence[Digit], here: Sequence[Digit]) -> jax.Array:
    done = list(here)
    for name, digit in zip(names, given, strict=True):
        x = take_digit(x, digit, lax.axis_index(name), done)
        done.append(digit)
    return x


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _slice_unused(x: jax.Array, names: tuple[str, ...], given: tuple[Digit, ...], here: tuple[Digit, ...]) -> jax.Array:
    return _slices(x, names, given, here)


def _slice_forward(x: jax.Array, names: Any, given: Any, here: Any) -> tuple[jax.Array, None]:
    return _slices(x, names, given, here), None


def _slice_backward(names: Any, given: Any, here: Any, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (_gather(g, names, given, here, "invarying"),)


_slice_unused.defvjp(_slice_forward, _slice_backward)


def _contribute(x: jax.Array, step: Step, axes: tuple[Axis, ...]) -> jax.Array:
    """Makes a sum of which every part but one is zero: the first device's value, or each device's piece in its own place."""
    old = digits(step.before, axes)
    names = tuple(axes[i].name for i in step.axes if step.before[i].kind in "UR")
    x = contribute(x, names) if names else x
    moved = [(axes[i].name, d) for i in step.axes if (d := old[i]) is not None]
    return _among_zeros(x, moved, _others(old, step.axes)) if moved else x


def contribute(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Makes a whole value a sum along axes: the first device's is left, the others' are zero."""
    differing = tuple(n for n in names if n in varying(x))
    same = tuple(n for n in names if n not in differing)
    x = _first_of_unused(x, same) if same else x
    return _first(x, differing) if differing else x


def _first(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    first = jnp.all(jnp.stack([lax.axis_index(name) == 0 for name in names]))
    return lax.select_n(*aligned([first, jnp.zeros_like(x), x]))


def _among_zeros(x: jax.Array, moved: Sequence[tuple[str, Digit]], here: Sequence[Digit]) -> jax.Array:
    """The tensor that has a device's piece in its place, and zeros in the others'."""
    digits_ = [d for _, d in moved]
    mine = jnp.ones((), bool)
    for k, (name, digit) in enumerate(moved):
        shape = [digit.size if j == k else 1 for j in range(len(moved))]
        places = jnp.arange(digit.size, dtype=jnp.int32).reshape(shape)
        mine = jnp.logical_and(*aligned([mine, jnp.equal(*aligned([places, lax.axis_index(name)]))]))
    count = mine.size
    whole = jnp.broadcast_to(mine.reshape(count, *(1 for _ in x.shape)), (count, *x.shape))
    pieces = jnp.broadcast_to(x, (count, *x.shape))
    return put(lax.select_n(*aligned([whole, jnp.zeros_like(pieces), pieces])), digits_, here)


# Of what is the same on every device one device's cotangent counts: so the two are each other's dual.


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _same(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    return common(vary(x, names), names)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _first_of_unused(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    return _first(x, names)


_same.defvjp(lambda x, names: (_same(x, names), None), lambda names, _, g: (_first_of_unused(g, names),))
_first_of_unused.defvjp(lambda x, names: (_first_of_unused(x, names), None), lambda names, _, g: (_same(g, names),))


def _contiguous(moved: Sequence[Digit], here: Sequence[Digit]) -> int | None:
    """The dimension whose most major digits are exactly those moved, major first: JAX's tiled collectives apply."""
    outer = 1
    for d in moved:
        if d.dim != moved[0].dim or d.outer != outer:
            return None
        outer *= d.size
    return moved[0].dim


def _gather(x: jax.Array, names: Sequence[str], taken: Sequence[Digit], here: Sequence[Digit], to: str) -> jax.Array:
    dim = _contiguous(taken, here)
    if dim is not None:
        return lax.all_gather(x, tuple(names), axis=dim, tiled=True, to=to)
    # Along a new dimension, tiled: one that is not tiled JAX cannot lower for PRNG keys.
    return put(lax.all_gather(x[None], tuple(names), axis=0, tiled=True, to=to), taken, here)


def _scatter(x: jax.Array, names: Sequence[str], given: Sequence[Digit], here: Sequence[Digit]) -> jax.Array:
    dim = _contiguous(given, here)
    if dim is not None:
        return lax.psum_scatter(x, tuple(names), scatter_dimension=dim, tiled=True)
    return lax.psum_scatter(cut(x, given, here), tuple(names), scatter_dimension=0, tiled=False)


def _exchange(
    x: jax.Array, names: Sequence[str], taken: Sequence[Digit], given: Sequence[Digit], here: Sequence[Digit]
) -> jax.Array:
    old, new = _contiguous(taken, here), _contiguous(given, here)
    if old is not None and new is not None and old != new:
        return lax.all_to_all(x, tuple(names), split_axis=new, concat_axis=old, tiled=True)
    pieces = cut(x, given, [*here, *taken])
    return put(lax.all_to_all(pieces, tuple(names), split_axis=0, concat_axis=0, tiled=True), taken, [*here, *given])


def _segments(n: int, moved: Sequence[Digit], here: Sequence[Digit], whole: bool) -> list[int]:
    """One dimension of a local piece, seen as [before, digit, between, digit, ..., after] (`whole`), or without the digits."""
    sizes, before = [], 1
    for d in sorted(moved, key=lambda d: d.outer):
        outer = outer_here(d, [*here, *(m for m in moved if m.outer < d.outer)])
        sizes += [outer // before, d.size] if whole else [outer // before]
        before = outer
    inside = before
    for d in moved:
        inside *= d.size if whole else 1
    return [*sizes, n // inside]


def _views(shape: Sequence[int], moved: Sequence[Digit], here: Sequence[Digit], whole: bool) -> tuple[list[int], list[int]]:
    """A shape with every moved digit's place opened, and the positions of the digits (`whole`) in the order of `moved`."""
    view: list[int] = []
    position: dict[Digit, int] = {}
    for dim, n in enumerate(shape):
        mine = sorted((d for d in moved if d.dim == dim), key=lambda d: d.outer)
        others = [d for d in here if d.dim == dim]
        for k, d in enumerate(mine):
            position[d] = len(view) + (2 * k + 1 if whole else k + 1)
        view += _segments(n, mine, others, whole)
    return view, [position[d] for d in moved]


def cut(x: jax.Array, given: Sequence[Digit], here: Sequence[Digit]) -> jax.Array:
    """`[product of digit sizes, *piece]`: the pieces that `x` splits into, the first digit most major."""
    view, places = _views(x.shape, given, here, whole=True)
    rest = [i for i in range(len(view)) if i not in places]
    shape = list(x.shape)
    for d in given:
        shape[d.dim] //= d.size
    count = 1
    for d in given:
        count *= d.size
    return x.reshape(view).transpose(*places, *rest).reshape(count, *shape)


def put(pieces: jax.Array, taken: Sequence[Digit], here: Sequence[Digit]) -> jax.Array:
    """The inverse of `cut`: the tensor whose pieces these are."""
    local = pieces.shape[1:]
    view, places = _views(local, taken, here, whole=False)
    x = pieces.reshape(*(d.size for d in taken), *view)
    k = len(taken)
    order: list[int] = []
    for i in range(len(view)):
        # digits that belong before segment i; `places` counts segments that come before a digit
        order += [t for t, place in enumerate(places) if place == i]
        order.append(k + i)
    shape = list(local)
    for d in taken:
        shape[d.dim] *= d.size
    return x.transpose(order).reshape(shape)
