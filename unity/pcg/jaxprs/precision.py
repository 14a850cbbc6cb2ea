"""The precision of traces: JAX has 64-bit types while they are enabled, whatever the types of the arguments."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

WIDE = frozenset({"int64", "uint64", "float64", "complex128"})  # JAX has them only while 64 bits are enabled


def precision_of(types: Iterable[Any]) -> AbstractContextManager[object]:
    """Return a context in which a program with values of these types can be traced again: one with 64-bit types if it has any."""
    return jax.enable_x64(True) if any(str(t.dtype) in WIDE for t in types) else nullcontext()
