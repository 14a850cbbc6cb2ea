"""Collectives of named axes as operations on stacked pieces, to be used under a `vmap` of each axis.

`gathered` gives the pieces of all devices as one array, which is equal on all; `piece` gives each device its own part of such an
array. Under `vmap` both are views. Every collective is an ordinary function between the two.

These are primitives of unity's own, since JAX's collectives look for their axes among those of the current trace, to which
derivative rules, traced later, do not belong. JAX's batching rules also lack groups, several axes, and ragged pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import batching

from unity.pcg.jaxprs.jaxprs import floating
from unity.pcg.jaxprs.shard_maps.rotation import rotate

Sizes = Mapping[str, int]  # of the axes, in the order of the mesh


def _primitive(
    name: str,
    shape: Callable[[Any, int], tuple[int, ...]],
    of_pieces: Callable[..., tuple[Any, int | None]],
    of_equal: Callable[..., tuple[Any, int | None]],
    axis_of: int = 0,
) -> core.Primitive:
    """Return a primitive over one named axis, which `vmap` replaces by an operation on the dimension of that axis.

    Args:
        name: its name.
        shape: the shape of the result, from an operand and the size of the axis.
        of_pieces: (operand with the pieces stacked along dimension 0, size, **params) -> result and the dimension of its pieces,
            None if it is equal on all devices.
        of_equal: the same for an operand that is equal on all devices.
        axis_of: the number of dimensions that the result has more than the operand.
    """
    primitive = core.Primitive(name)
    primitive.def_abstract_eval(lambda x, *, axis, size, **params: x.update(shape=shape(x, size)))

    def batched(axis_data: Any, values: Any, dims: Any, *, axis: str, size: int, **params: Any) -> tuple[Any, int | None]:
        (x,), (dim,) = values, dims
        if axis_data.name == axis:
            return of_equal(x, size, **params) if dim is None else of_pieces(jnp.moveaxis(x, dim, 0), size, **params)
        if dim is None:
            return primitive.bind(x, axis=axis, size=size, **params), None
        before = max(0, -axis_of)
        return primitive.bind(jnp.moveaxis(x, dim, before), axis=axis, size=size, **params), before + axis_of

    batching.fancy_primitive_batchers[primitive] = batched
    return primitive


@jax.custom_jvp
def _first(x: jax.Array) -> jax.Array:
    """Return the first of stacked values that should be equal. The cotangent is divided between all, as JAX does unchecked."""
    return x[0]


@_first.defjvp
def _first_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return primals[0][0], tangents[0].mean(0)


def _same(x: Any, size: int) -> tuple[int, ...]:
    return x.shape


_GATHERED = _primitive(
    "gathered", lambda x, n: (n, *x.shape), lambda x, n: (x, None), lambda x, n: (jnp.broadcast_to(x, (n, *x.shape)), None), 1
)
_PIECE = _primitive(
    "piece", lambda x, n: x.shape[1:], lambda x, n: (jnp.stack([x[k, k] for k in range(n)]), 0), lambda x, n: (x, 0), -1
)
_AGREED = _primitive(
    "agreed",
    _same,
    lambda x, n, averaged: ((_first if averaged and floating(x) else lambda x: x[0])(x), None),
    lambda x, n, averaged: (x, None),
)
_INDEX = _primitive("index", _same, lambda x, n: (lax.iota(x.dtype, n), 0), lambda x, n: (lax.iota(x.dtype, n), 0))
_SUM = _primitive("summed", _same, lambda x, n: (lax.reduce_sum(x, (0,)), None), lambda x, n: (x * jnp.asarray(n, x.dtype), None))
_LARGEST = _primitive("largest", _same, lambda x, n: (lax.reduce_max(x, (0,)), None), lambda x, n: (x, None))
_SMALLEST = _primitive("smallest", _same, lambda x, n: (lax.reduce_min(x, (0,)), None), lambda x, n: (x, None))


def agreed(x: Any, axis: str, size: int, averaged: bool) -> Any:
    """Return a value that is equal on all devices along an axis as one value.

    averaged: divide the cotangent between the devices, which gives equal gradients if the values are equal.
    """
    return _AGREED.bind(x, axis=axis, size=size, averaged=averaged)


def piece(x: Any, sizes: Sizes) -> Any:
    """Return each device's own part of an array with a leading dimension for each axis."""
    for axis, size in sizes.items():
        x = _PIECE.bind(x, axis=axis, size=size)
    return x


def gathered(x: Any, sizes: Sizes) -> Any:
    """Return the pieces of all devices, stacked along one leading dimension for each axis."""
    for axis, size in reversed([*sizes.items()]):
        x = _GATHERED.bind(x, axis=axis, size=size)
    return x


def stacked(x: Any, sizes: Sizes) -> Any:
    """Return the same value, stacked along some axes even if it is equal on all devices."""
    return piece(gathered(x, sizes), sizes)


Params = Mapping[str, Any]


def _axes(params: Params, sizes: Sizes) -> Sizes:
    """Return the axes of a collective, in its own order, that have more than one device."""
    names = params["axes"] if "axes" in params else params["axis_name"]
    return {name: sizes[name] for name in (names if isinstance(names, tuple | list) else (names,)) if sizes[name] > 1}


def _over_pieces(change: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return a collective as a function of parameters, sizes of axes, and pieces.

    `change` takes the parameters and the stacked pieces of one group of devices, and returns the stacked results.
    """

    def run(params: Params, sizes: Sizes, *operands: Any) -> list[Any]:
        axes, groups = _axes(params, sizes), params.get("axis_index_groups")
        flat = [lax.reshape(gathered(x, axes), (prod(axes.values()), *x.shape)) for x in operands]
        if groups is None:
            result = change(params, *flat)
        else:
            each = [change(params, *(rows(x, group) for x in flat)) for group in groups]
            members = [k for group in groups for k in group]
            result = rows(lax.concatenate(each, 0), [members.index(k) for k in range(len(members))])
        return [piece(lax.reshape(result, (*axes.values(), *result.shape[1:])), axes)]

    return run


def rows(x: Any, numbers: Sequence[int | None]) -> Any:
    """Return rows of an array by number, and zeros for None."""
    n, moves = len(x), {(k - number) % len(x) for k, number in enumerate(numbers) if number is not None}
    if len(numbers) != n or len(moves) != 1:
        return _joined_rows(x, numbers)
    whole = rotate(x, moves.pop(), 0)
    missing = [k for k, number in enumerate(numbers) if number is None]
    if not missing:
        return whole
    row = lax.broadcasted_iota(jnp.int32, (n, *[1] * (x.ndim - 1)), 0)
    return jnp.where(reduce(lax.bitwise_or, (row == k for k in missing)), jnp.zeros((), x.dtype), whole)


def _joined_rows(x: Any, numbers: Sequence[int | None]) -> Any:
    """Join rows of an array by number, and zeros for None. Consecutive rows are one slice."""
    parts, start = [], 0
    for end in range(1, len(numbers) + 1):
        first, last = numbers[start], numbers[end - 1]
        following = numbers[end] if end < len(numbers) else -2
        if following != (None if last is None else last + 1):
            count = end - start
            parts.append(jnp.zeros_like(x[:count]) if first is None else lax.slice_in_dim(x, first, first + count))
            start = end
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)


def _reduced(primitive: core.Primitive, local: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return a reduction over named axes. `local`: the same one along dimensions of an array."""
    of_groups = _over_pieces(lambda _, x: jnp.broadcast_to(local(x, (0,)), x.shape))

    def run(params: Params, sizes: Sizes, *operands: Any) -> list[Any]:
        if params.get("axis_index_groups") is not None:
            return [of_groups(params, sizes, x)[0] for x in operands]
        positions = tuple(axis for axis in params["axes"] if isinstance(axis, int))
        results = [local(x, positions) if positions else x for x in operands]
        for axis, size in _axes({"axes": [axis for axis in params["axes"] if isinstance(axis, str)]}, sizes).items():
            results = [primitive.bind(x, axis=axis, size=size) for x in results]
        return results

    return run


def _joined(x: Any, dim: int, tiled: bool) -> Any:
    """Move the leading dimension before another one, and join the two if `tiled`."""
    x = jnp.moveaxis(x, 0, dim)
    return lax.reshape(x, (*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])) if tiled else x


def _split(x: Any, dim: int, parts: int, tiled: bool) -> Any:
    """Move a dimension, or the outer digit of it if `tiled`, to the front."""
    if tiled:
        x = lax.reshape(x, (*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :]))
    return jnp.moveaxis(x, dim, 0)


def _all_gather(params: Params, sizes: Sizes, x: Any) -> list[Any]:
    dim, tiled, axes = params["all_gather_dimension"], params["tiled"], _axes(params, sizes)
    if params.get("axis_index_groups") is not None:
        return _over_pieces(lambda _, x: jnp.stack([_joined(x, dim, tiled)] * len(x)))(params, sizes, x)
    return [_joined(lax.reshape(gathered(x, axes), (prod(axes.values()), *x.shape)), dim, tiled)]


def _reduce_scatter(params: Params, sizes: Sizes, x: Any) -> list[Any]:
    dim, tiled, axes = params["scatter_dimension"], params["tiled"], _axes(params, sizes)
    if params.get("axis_index_groups") is not None:
        return _over_pieces(lambda _, x: _split(lax.reduce_sum(x, (0,)), dim, len(x), tiled))(params, sizes, x)
    (total,) = COLLECTIVES["psum"]({"axes": tuple(axes)}, sizes, x)
    parts = _split(total, dim, prod(axes.values()), tiled)
    return [piece(lax.reshape(parts, (*axes.values(), *parts.shape[1:])), axes)]


def _all_to_all(params: Params, x: Any) -> Any:
    sent = jax.vmap(lambda piece: _split(piece, params["split_axis"], len(x), True))(x)  # [from, to, ...]
    return jax.vmap(lambda received: _joined(received, params["concat_axis"], True))(jnp.swapaxes(sent, 0, 1))


def _ppermute(params: Params, x: Any) -> Any:
    sources = {to: source for source, to in params["perm"]}
    return rows(x, [sources.get(k) for k in range(len(x))])


def _ragged_all_to_all(params: Params, x: Any, output: Any, starts: Any, sent: Any, targets: Any, received: Any) -> Any:
    """Return the outputs with the rows written that each device receives: [to, row, ...].

    Args:
        params: the parameters.
        x, output: rows to send, and to write to: [device, row, ...].
        starts, sent, targets: the first row, the number of rows, and their first row in the output: [from, to].
        received: the numbers of rows that each device receives, which `sent` repeats: [to, from].
    """
    del received
    row = jnp.arange(output.shape[1])
    relative = row - targets[..., None]  # [from, to, row]
    written = (relative >= 0) & (relative < sent[..., None])
    sender = jnp.argmax(written, 0)
    source = jnp.take_along_axis(relative + starts[..., None], sender[None], 0)[0]
    values = x[sender, source]
    return jnp.where(jnp.any(written, 0).reshape(*sender.shape, *[1] * (x.ndim - 2)), values, output)


def _axis_index(params: Params, sizes: Sizes) -> list[Any]:
    index = jnp.int32(0)
    for axis, size in _axes(params, sizes).items():
        index = index * size + _INDEX.bind(jnp.int32(0), axis=axis, size=size)
    return [index]


COLLECTIVES: Mapping[str, Callable[..., list[Any]]] = {
    "psum": _reduced(_SUM, lax.reduce_sum),
    "psum_invariant": _reduced(_SUM, lax.reduce_sum),
    "pmax": _reduced(_LARGEST, lax.reduce_max),
    "pmin": _reduced(_SMALLEST, lax.reduce_min),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _over_pieces(_all_to_all),
    "ppermute": _over_pieces(_ppermute),
    "pbroadcast": _over_pieces(lambda params, x: jnp.broadcast_to(x[params["source"]], x.shape)),
    "ragged_all_to_all": _over_pieces(_ragged_all_to_all),
    "axis_index": _axis_index,
}
