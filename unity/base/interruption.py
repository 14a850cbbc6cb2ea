"""Ctrl-C as the end of a search that returns its best result so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class UntilInterrupted(Generic[T]):
    """An iterable that ends early if Ctrl-C is pressed while the next value is computed, and then sets `interrupted`."""

    def __init__(self, values: Iterable[T]) -> None:
        self._values = values
        self.interrupted = False

    def __iter__(self) -> Iterator[T]:
        try:
            yield from self._values
        except KeyboardInterrupt:
            self.interrupted = True
