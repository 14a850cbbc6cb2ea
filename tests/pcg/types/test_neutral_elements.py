"""Neutral elements: a reduction of one and any other number is that number."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from precision import in_64_bits

from unity.pcg.types.neutral_elements import neutral_element

REDUCTIONS = {"sum": lax.reduce_sum, "max": lax.reduce_max, "min": lax.reduce_min, "or": lax.reduce_or, "and": lax.reduce_and}
FLOATS = ("float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "float8_e5m2", "float8_e4m3", "bfloat16", "float16", "float32")
TYPES = ("bool", "int4", "uint4", "int8", "uint8", "int64", "uint64", *FLOATS, "float64", "complex64", "complex128")


def extremes(dtype):
    if jnp.issubdtype(dtype, jnp.bool_):
        return [False, True]
    if jnp.issubdtype(dtype, jnp.integer):
        return [int(jnp.iinfo(dtype).min), 1, int(jnp.iinfo(dtype).max)]
    limits = [float(jnp.finfo(dtype).min), 0.5, float(jnp.finfo(dtype).max)]
    with np.errstate(all="ignore"):
        limits += [x for x in (np.inf, -np.inf) if np.isinf(np.asarray(x).astype(dtype))]
    if jnp.issubdtype(dtype, jnp.complexfloating):  # those with an infinite real part lose the imaginary part in JAX's extrema
        return [complex(x, y) for x in limits if np.isfinite(x) for y in limits]
    return limits


@pytest.mark.parametrize("dtype", TYPES)
def test_a_neutral_element_changes_no_reduction(dtype):
    with in_64_bits():
        for reduction, reduce in REDUCTIONS.items():
            if (reduction == "sum") if dtype == "bool" else (reduction in ("or", "and")):
                continue
            numbers = jnp.asarray(extremes(dtype), dtype)
            pairs = jnp.stack([jnp.full_like(numbers, neutral_element(reduction, dtype)), numbers])
            np.testing.assert_array_equal(np.asarray(reduce(pairs, [0])), np.asarray(numbers))
