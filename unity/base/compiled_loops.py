"""Loops over arrays: compiled if Numba is installed (the extra `fast`), interpreted otherwise, with equal results.

A compiled step takes a tenth of a microsecond where Python takes one or two. A loop is compiled when it is called for the first
time on a machine, which takes some seconds, and cached on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

R = TypeVar("R")

LOADING = 0.5  # seconds that it takes to load Numba


def compiled(loop: Callable[..., R], parts: Sequence[Callable] = ()) -> Callable[..., R]:
    """Compile a loop with Numba when it is first called, or interpret it where Numba is missing.

    Args:
        loop: a function of numbers and sequences (or named tuples of sequences) in the subset of Python that Numba compiles. The
            compiled function takes arrays in place of the sequences, and may write to them.
        parts: the functions that `loop` calls, compiled ones included.
    """

    @cache
    def implementation() -> Callable[..., R]:
        if not load():
            return interpreted(loop)
        from numba import njit

        files = {file for part in parts for file in _allow_calls(part)} - {loop.__code__.co_filename}
        try:
            if files:  # Numba's cache sees changes of the function's own file only, so a hash of the others is in its name
                texts = b"".join(Path(file).read_bytes() for file in sorted(files))
                loop.__qualname__ += hashlib.sha256(texts).hexdigest()[:16]
            return njit(cache=True)(loop)
        except (RuntimeError, OSError):  # no folder for the cache, or no source files
            return njit(loop)

    @wraps(loop)
    def call(*args: Any) -> R:
        return implementation()(*args)

    _PARTS[call] = parts
    return call


_PARTS: dict[Callable, Sequence[Callable]] = {}  # compiled loop → the functions that it calls


def _allow_calls(part: Callable) -> set[str]:
    """Let compiled loops call a function and everything it calls. Returns the source files of all these."""
    from numba.extending import overload

    loop = getattr(part, "__wrapped__", part)
    overload(part, strict=False)(lambda *_, **__: loop)
    return {loop.__code__.co_filename, *(file for other in _PARTS.get(part, ()) for file in _allow_calls(other))}


@cache
def load() -> bool:
    """Load Numba. Returns whether it is installed."""
    try:
        import_module("numba")  # takes half a second
    except ImportError:  # not installed, or for another version of NumPy
        return False
    return True


class _TimeInNumPy:
    """The time that this process has spent in NumPy on work that compiled loops would do in almost none."""

    seconds = 0.0


def pays(seconds: float) -> bool:
    """Return whether to compile a loop whose work takes NumPy `seconds`.

    The answer is yes once NumPy has spent as long as Numba takes to load. However much work follows, nobody waits more than twice
    as long as with the better choice (the ski rental problem).
    """
    if _TimeInNumPy.seconds < LOADING and not load.cache_info().currsize:
        _TimeInNumPy.seconds += seconds
        return False
    return load()


def interpreted(loop: Callable[..., R]) -> Callable[..., R]:
    """Return a loop as a function that runs it in plain Python, on lists: Python reads and writes them faster than arrays."""

    @wraps(loop)
    def call(*args: Any) -> R:
        copies = [_lists(a) for a in args]
        result = loop(*copies)
        for arrays, lists in zip(args, copies, strict=True):
            for array, values in zip(arrays, lists, strict=True) if isinstance(arrays, tuple) else ((arrays, lists),):
                if isinstance(array, np.ndarray):
                    array[:] = values
        return result

    return call


def _lists(argument: Any) -> Any:
    """Convert an array, or each array of a named tuple, to a list."""
    if isinstance(argument, tuple):
        return type(argument)(*map(_lists, argument))
    return argument.tolist() if isinstance(argument, np.ndarray) else argument
