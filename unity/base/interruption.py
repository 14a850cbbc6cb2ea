"""Ctrl-C while something is searched for: it ends the search, and what was found until then is the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class UntilInterrupted(Generic[T]):
    """The values of an iterable, until it ends or Ctrl-C is pressed while it looks for the next; whether it was, `interrupted` says
    then."""

    def __init__(self, values: Iterable[T]) -> None:
        self._values = values
        self.interrupted = False

    def __iter__(self) -> Iterator[T]:
        try:
            yield from self._values
        except KeyboardInterrupt:
            self.interrupted = True
