"""64-bit types for a test, without any effect on the tests after it."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def in_64_bits() -> Iterator[None]:
    """Enable 64-bit types, and restore the setting, which an exported file of a program with such types changes when it is run."""
    before = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with jax.enable_x64(True):
            yield
    finally:
        jax.config.update("jax_enable_x64", before)
