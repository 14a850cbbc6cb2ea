"""Contexts in which programs are traced: without the user's mesh, with 64-bit types, and with JAX's promotion of types.

Types mention a mesh that `jax.set_mesh` has set. JAX has 64-bit types only while they are enabled, whatever the arguments' types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, get_mesh, use_abstract_mesh

NO_MESH = AbstractMesh((), ())
NO_DEVICES = Mesh(np.empty((), object), ())
WIDE = frozenset({"int64", "uint64", "float64", "complex128"})  # JAX has them only while 64 bits are enabled

T = TypeVar("T")


def without_mesh() -> AbstractContextManager[object]:
    """Return a context in which tracing sees no mesh."""
    return use_abstract_mesh(NO_MESH)


def unset() -> AbstractContextManager[object]:
    """Return a context without the mesh that the user has set, on whose devices alone JAX would run programs."""
    try:
        return without_mesh() if get_mesh().empty else jax.set_mesh(NO_DEVICES)
    except ValueError:  # inside of a jit, where no program is run
        return without_mesh()


@contextmanager
def default_promotion() -> Iterator[None]:
    """Let operands of different ranks and types be combined, whatever the user has set, as JAX does by default."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def precision_of(types: Iterable[Any]) -> AbstractContextManager[object]:
    """Return a context in which a program with values of these types can be traced again: one with 64-bit types if it has any."""
    return jax.enable_x64(True) if any(str(t.dtype) in WIDE for t in types) else nullcontext()


def words_of(keys: Any) -> np.ndarray:
    """Return the words of random keys, also while a program is being traced."""
    with jax.ensure_compile_time_eval(), without_mesh():
        return np.asarray(jax.random.key_data(keys))


def in_new_thread(run: Callable[[], T]) -> T:
    """Run a function in a new thread, so outside of any trace and any mesh, with the precision of this one."""
    wide = bool(jax.config.read("jax_enable_x64"))

    def alone() -> T:
        with jax.enable_x64(wide):
            return run()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(alone).result()
