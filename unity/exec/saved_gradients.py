"""Gradients that the forward rule of a `custom_vjp` computes and its backward rule reads, of the operands that are differentiated.

JAX may trace a forward rule several times, for other differentiated operands each time, and join the residuals of one trace with
the structure of another (`jax.checkpoint` of a function that was differentiated before). So the structure is the same for all: an
absent gradient is an array without elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def in_order(numbers: Sequence[int], values: Sequence[Any], rest: Mapping[int, Any]) -> list[Any]:
    """Return all operands in order, given the values of those with these numbers, and the others by number."""
    operands = {**rest, **dict(zip(numbers, values, strict=True))}
    return [operands[k] for k in range(len(operands))]


def saved(gradients: Mapping[int, Any], numbers: Sequence[int]) -> list[Any]:
    """Return the residuals for the gradients of the operands with these numbers, of which some have none."""
    return [gradients[k] if k in gradients else jnp.zeros((0,)) for k in numbers]


def restored(residuals: Sequence[Any]) -> list[Any]:
    """Return the gradients that were saved, None for those that are absent."""
    return [x if x.size else None for x in residuals]


def saved_flags(flags: Sequence[bool]) -> list[jax.Array]:
    """Return residuals for truth values that are known while a rule is traced: they are the shapes."""
    return [jnp.zeros((int(flag), 0)) for flag in flags]


def restored_flags(residuals: Sequence[jax.Array]) -> list[bool]:
    """Return the truth values that were saved."""
    return [bool(x.shape[0]) for x in residuals]
