"""Along which mesh axes JAX takes a value to differ, inside of a `shard_map`; and values made to differ along more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

TIME = "time"  # an axis that no mesh has: what is partitioned along it comes piece after piece


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
