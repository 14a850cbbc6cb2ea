"""Neutral elements of reductions, which padding of tensors and halos beyond their borders contain."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def neutral_element(reduction: str, dtype: Any) -> float:
    """Return the number of a type that does not change a "sum", "max", "min", "or" or "and"; zero for any other reduction."""
    if reduction not in ("max", "min"):
        return int(reduction == "and")
    largest = reduction == "min"
    if jnp.issubdtype(dtype, jnp.bool_):
        return largest
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).max if largest else jnp.iinfo(dtype).min)
    if np.isinf(np.asarray(np.inf).astype(dtype)):
        return np.inf if largest else -np.inf  # of complex numbers, too: JAX starts from it, though -inf-1j is before -inf
    return float(jnp.finfo(dtype).max if largest else jnp.finfo(dtype).min)  # some types of 8 bits have no infinity
