"""The mesh axes along which JAX takes a value to vary inside of a `shard_map`, and casts that change them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

CAST = "unreplicate"
# primitives that change the type of a value along some axes, and nothing else
CASTS = frozenset({"pvary", "pcast", "preduced", "reduced_vary_cast", CAST})
TIME = "a time"  # not a mesh axis, and the name of none: one device processes the pieces along it one after the other

_now: ContextVar[Any] = ContextVar("_now")


class NoPosition(NameError):
    """Raised for a position along the axis of time where no piece has its turn, as JAX raises NameError outside of a mesh axis."""


@contextmanager
def at_time(number: Any) -> Iterator[None]:
    """Let `position_along` return the number of the piece whose turn it is, as the position along the axis of time."""
    token = _now.set(number)
    try:
        yield
    finally:
        _now.reset(token)


def position_along(name: str) -> Any:
    """Return the position of this device along a mesh axis, or of this piece along the axis of time.

    Raises NameError outside of the axis: `NoPosition` for the axis of time.
    """
    if name != TIME:
        return lax.axis_index(name)
    number = _now.get(None)
    if number is None:
        raise NoPosition(f"there is no position along {TIME}")
    return number


_primitive = core.Primitive(CAST)
_primitive.def_impl(lambda x, *, axes: x)
mlir.register_lowering(_primitive, lambda context, x, *, axes: [x])


@_primitive.def_abstract_eval
def _without(x: Any, *, axes: tuple[str, ...]) -> Any:
    known = x.manual_axis_type
    return x.update(manual_axis_type=known.update(varying=known.varying - set(axes)))


def _first_cotangent(cotangent: Any, _: Any, *, axes: tuple[str, ...]) -> list[Any]:
    first = jnp.all(jnp.stack([lax.axis_index(axis) == 0 for axis in axes]))
    cotangent = lax.pcast(cotangent, axes, to="varying")
    return [jnp.where(first, cotangent, jnp.zeros_like(cotangent))]


ad.deflinear2(_primitive, _first_cotangent)
batching.defvectorized(_primitive)


def common(x: Any, names: tuple[str, ...]) -> jax.Array:
    """Cast a value that is equal on all devices along some axes, though JAX takes it to vary there, to one that does not vary.

    JAX has no such cast, as it cannot check it. It compiles to nothing. Its cotangent is that of the first device.
    """
    return _primitive.bind(x, axes=names)


def varying(x: Any) -> frozenset[str]:
    """Return the mesh axes along which JAX takes a value to vary."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(x: Any, names: Sequence[str] | frozenset[str]) -> Any:
    """Cast a value to vary along the named axes, too. In the backward pass this is an all-reduce.

    The names of a set are sorted, since every process must have the same program.
    """
    missing = tuple(n for n in (sorted(names) if isinstance(names, frozenset) else names) if n not in varying(x) and n != TIME)
    return lax.pcast(x, missing, to="varying") if missing else x


def aligned(operands: list) -> list:
    """Cast operands to vary along the same axes, as JAX's primitives require."""
    names = frozenset().union(*(varying(x) for x in operands)) if operands else frozenset()
    return [vary(x, names) for x in operands] if names else operands
