"""Along which mesh axes JAX takes a value to differ, inside of a `shard_map`; and values made to differ along more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

CAST = "unreplicate"
TIME = "time"  # an axis that no mesh has: what is partitioned along it comes piece after piece


_primitive = core.Primitive(CAST)
_primitive.def_impl(lambda x, *, axes: x)
mlir.register_lowering(_primitive, lambda context, x, *, axes: [x])


@_primitive.def_abstract_eval
def _without(x: Any, *, axes: tuple[str, ...]) -> Any:
    known = x.manual_axis_type
    return x.update(manual_axis_type=known.update(varying=known.varying - set(axes)))


def common(x: Any, names: tuple[str, ...]) -> jax.Array:
    """`x`, which devices along the named axes have in common though JAX takes it to differ: it has no such cast, as it cannot know
    that. Compiled it is nothing. Its derivative is the caller's to give."""
    return _primitive.bind(x, axes=names)


def varying(x: Any) -> frozenset[str]:
    """The mesh axes along which JAX takes a value to differ."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(x: Any, names: Sequence[str] | frozenset[str]) -> Any:
    """`x`, known to JAX to differ along the named axes too. Backward, this is their all-reduce.

    A set's names are taken in one order: every process must have the same program.
    """
    missing = tuple(n for n in (sorted(names) if isinstance(names, frozenset) else names) if n not in varying(x) and n != TIME)
    return lax.pcast(x, missing, to="varying") if missing else x


def aligned(operands: list) -> list:
    """Operands made to vary over the same axes, as JAX's primitives require."""
    names = frozenset().union(*(varying(x) for x in operands)) if operands else frozenset()
    return [vary(x, names) for x in operands] if names else operands
