"""What was made last, up to so many bytes: what is asked for again is there, and what was not asked for longest is forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """A dictionary that keeps what was used last, `most` bytes of it and always the last one. `nbytes` says what a value has."""

    def __init__(self, most: int, nbytes: Callable[[V], int]) -> None:
        super().__init__()
        self.most, self.nbytes, self.held = most, nbytes, 0

    def __getitem__(self, key: K) -> V:
        self.move_to_end(key)
        return super().__getitem__(key)

    def __setitem__(self, key: K, value: V) -> None:
        self.held += self.nbytes(value) - (self.nbytes(super().__getitem__(key)) if key in self else 0)
        super().__setitem__(key, value)
        self.move_to_end(key)
        while self.held > self.most and len(self) > 1:
            _, last = self.popitem(last=False)
            self.held -= self.nbytes(last)
