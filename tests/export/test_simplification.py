"""Programs that differ in what JAX's public functions insert themselves have equal meanings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from unity.export.equivalence import meanings
from unity.pcg.ir.program import close

ZERO, ROWS, COLUMNS = np.int32(0), np.int32(6), np.int32(4)


def wrapped(index: Any, size: Any) -> Any:
    return lax.select(lax.lt(index, ZERO), lax.add(index, size), index)


def meanings_of(fn: Callable[..., Any]) -> list[Any]:
    pieces = jax.ShapeDtypeStruct((6, 4), "bfloat16"), jax.ShapeDtypeStruct((3, 4), "bfloat16"), jax.ShapeDtypeStruct((), "int32")
    return meanings(close(jax.make_jaxpr(fn)(*pieces)))


def test_a_number_as_an_index_is_the_same_before_and_after_it_is_wrapped() -> None:
    """JAX wraps a number in the derivative of a slice, as it wraps an index that is computed."""

    def both(x: Any, y: Any, i: Any) -> Any:
        return lax.dynamic_update_slice_p.bind(x, y, wrapped(i, ROWS), wrapped(ZERO, COLUMNS))

    def first(x: Any, y: Any, i: Any) -> Any:
        return lax.dynamic_update_slice_p.bind(x, y, wrapped(i, ROWS), ZERO)

    def other(x: Any, y: Any, i: Any) -> Any:
        return lax.dynamic_update_slice_p.bind(x, y, wrapped(i, ROWS), np.int32(1))

    assert meanings_of(both) == meanings_of(first) != meanings_of(other)
