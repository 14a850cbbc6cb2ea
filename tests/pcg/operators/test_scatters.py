"""Scatters whose operand's rows are divided: every mode, index type and reduction, with indices outside of the operand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from parallel_cases import Application

from unity.pcg.types.parallel_type import partitioned

ROWS, COLUMNS, UPDATES = 8, 4, 6
INDEXED: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda x, i: x.at[i],
    "elements": lambda x, i: x.at[i, i // 2],
    "two dimensions around a third": lambda x, i: x.at[i, :, i],
    "parts of rows": lambda x, i: x.at[i, : COLUMNS - 1],
    "columns": lambda x, i: x.at[:, i],
}


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


OPERATIONS = (("add", "clip"), ("set", "drop"), ("subtract", "fill"), ("max", "clip"), ("min", "drop"))
CASES = [
    (where, dtype, *OPERATIONS[(k + shift) % len(OPERATIONS)])
    for shift, dtype in enumerate(("int8", "uint8", "int32"))
    for k, where in enumerate(INDEXED)
]


@pytest.mark.parametrize(("where", "dtype", "operation", "mode"), CASES)
def test_updates_outside_of_the_operand_reach_no_device(where: str, dtype: str, operation: str, mode: str) -> None:
    rng = np.random.default_rng(len(where))
    indices = rng.integers(-ROWS - 2 if dtype.startswith("i") else 0, ROWS + 3, UPDATES).astype(dtype)
    x = rng.normal(size=(ROWS, COLUMNS, ROWS) if where.startswith("two") else (ROWS, COLUMNS))
    updates = rng.normal(size=np.shape(INDEXED[where](jnp.asarray(x), indices).get()))

    def scatter(x: Any, i: Any, u: Any) -> Any:
        result = getattr(INDEXED[where](x, i), operation)(u, mode=mode)
        return lax.stop_gradient(result) if operation in ("min", "max") else result

    checked = Application(scatter, [x, indices, updates], (2,)).check()
    assert where == "columns" or any(c.operands[0] == (partitioned(0),) for c in checked)
