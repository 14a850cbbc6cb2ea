"""Operators all of whose operands are constants of the program, which JAX knows to be equal on all devices.

Devices still compute different pieces of the results, from their positions. `Application.check` traces every choice of every
operator on constants; the tests here compare values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from parallel_cases import Application

from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED

ROWS = np.array([0, 9, 5, -11])  # two of them outside
CONSTANTS: dict[str, Callable[[], Any]] = {
    "mask of samples": lambda: jnp.ones(8).at[0].set(0.0),
    "mask of booleans": lambda: jnp.ones(8, bool).at[ROWS].set(False),
    "bias of a column": lambda: jnp.zeros((8, 4)).at[:, 0].set(-1e9),
    "sum": lambda: jnp.ones((8, 4)).at[ROWS].add(2.0, mode="clip"),
    "product": lambda: jnp.ones((8, 4)).at[ROWS].multiply(2.0, mode="drop"),
    "maximum": lambda: jnp.zeros((8, 4)).at[ROWS].max(2.0, mode="clip"),
    "rows of a table": lambda: jnp.full((8, 4), 3.0)[ROWS],
    "count of neighbours": lambda: lax.conv_general_dilated(jnp.ones((1, 1, 8)), jnp.ones((1, 1, 3)), (1,), "SAME"),
    "product of groups": lambda: lax.ragged_dot(jnp.ones((8, 4)), jnp.ones((2, 4, 4)), jnp.array([3, 4])),
    "solution": lambda: jnp.linalg.solve(jnp.ones((8, 2, 2)) + jnp.eye(2), jnp.ones((8, 2, 1))),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_devices_compute_their_parts_of_what_follows_from_constants(name: str) -> None:
    checked = Application(CONSTANTS[name], [], (2,)).check()
    assert any(s not in (UNUSED, REPLICATED, PARTIAL) for c in checked for s in c.results[0])
