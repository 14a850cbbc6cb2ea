"""Loops over arrays: compiled where Numba is installed (the extra `fast`), interpreted where it is not. The results are the same.

A compiled loop takes a tenth of a microsecond where Python takes one or two. It is compiled when it is called for the first time
on a machine, which takes some seconds, and kept on disk.
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
    """A function of numbers and sequences (or named tuples of such), in the part of Python that Numba knows, as one of numbers and
    arrays, which it may write to. `parts`: other such functions that it calls, compiled ones too."""

    @cache
    def made() -> Callable[..., R]:
        if not load():
            return interpreted(loop)
        from numba import njit

        files = {file for part in parts for file in _callable(part)} - {loop.__code__.co_filename}
        try:
            if files:  # Numba forgets what it kept of a function when the function's own file changes: another name for others
                texts = b"".join(Path(file).read_bytes() for file in sorted(files))
                loop.__qualname__ += hashlib.sha256(texts).hexdigest()[:16]
            return njit(cache=True)(loop)
        except (RuntimeError, OSError):  # there is no folder to keep it in, or there are no files
            return njit(loop)

    @wraps(loop)
    def call(*args: Any) -> R:
        return made()(*args)

    _PARTS[call] = parts
    return call


_PARTS: dict[Callable, Sequence[Callable]] = {}  # of what is compiled


def _callable(part: Callable) -> set[str]:
    """Lets compiled loops call a function, or the loop that it compiles, and what that calls. Gives the files that they are in."""
    from numba.extending import overload

    loop = getattr(part, "__wrapped__", part)
    overload(part, strict=False)(lambda *_, **__: loop)
    return {loop.__code__.co_filename, *(file for other in _PARTS.get(part, ()) for file in _callable(other))}


@cache
def load() -> bool:
    """Loads Numba; whether it is there."""
    try:
        import_module("numba")  # takes half a second, so not before it is needed
    except ImportError:  # it is not installed, or is of a version for other versions of NumPy
        return False
    return True


class _Lost:
    """Seconds that this process has spent with what compiled loops would have done in next to none."""

    seconds = 0.0


def pays(seconds: float) -> bool:
    """Whether work that takes NumPy so long is better given to a compiled loop: once as much has been spent without as it takes to
    load Numba. So nobody waits more than twice as long as by the better choice, however much is still to come (ski rental)."""
    if _Lost.seconds < LOADING and not load.cache_info().currsize:
        _Lost.seconds += seconds
        return False
    return load()


def interpreted(loop: Callable[..., R]) -> Callable[..., R]:
    """The same by Python alone, which reads and writes lists faster than arrays."""

    @wraps(loop)
    def call(*args: Any) -> R:
        given = [_lists(a) for a in args]
        found = loop(*given)
        for arrays, lists in zip(args, given, strict=True):
            for array, values in zip(arrays, lists, strict=True) if isinstance(arrays, tuple) else ((arrays, lists),):
                if isinstance(array, np.ndarray):
                    array[:] = values
        return found

    return call


def _lists(given: Any) -> Any:
    """Lists instead of an array, or of a named tuple of arrays."""
    if isinstance(given, tuple):
        return type(given)(*map(_lists, given))
    return given.tolist() if isinstance(given, np.ndarray) else given
