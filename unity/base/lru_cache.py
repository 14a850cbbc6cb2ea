"""An LRU cache bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRUCache(OrderedDict[K, V]):
    """A dictionary that evicts its least recently used values when all together exceed its capacity, but keeps at least one.

    Args:
        capacity: the bound, in bytes, or in values of which each counts as one.
        nbytes: returns the size of a value, in bytes, or one.
    """

    def __init__(self, capacity: int, nbytes: Callable[[V], int]) -> None:
        super().__init__()
        self.capacity, self.nbytes, self.used = capacity, nbytes, 0

    def __getitem__(self, key: K) -> V:
        self.move_to_end(key)
        return super().__getitem__(key)

    def get(self, key: K, default: V | None = None) -> V | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a value, which becomes the most recently used one, or the default."""
        if key not in self:
            return default
        return self[key]

    def __setitem__(self, key: K, value: V) -> None:
        self.used += self.nbytes(value) - (self.nbytes(super().__getitem__(key)) if key in self else 0)
        super().__setitem__(key, value)
        self.move_to_end(key)
        while self.used > self.capacity and len(self) > 1:
            _, oldest = self.popitem(last=False)
            self.used -= self.nbytes(oldest)
