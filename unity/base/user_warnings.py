"""Warnings at the user's line, however deep in this package they are issued, and their records, by which they are repeated."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from unity.base.documents import Record
from unity.base.installation import PACKAGE

_FILES = str(PACKAGE) + os.sep


class IssuedWarning(Record):
    """A `UserWarning` that was issued.

    Attributes:
        text: its text.
        place: the file and the line that it is about; None if it was issued at the nearest caller outside of this package.
    """

    text: str
    place: tuple[str, int] | None = None


_ISSUED: ContextVar[list[IssuedWarning] | None] = ContextVar("issued", default=None)


def warn_user(text: str, place: tuple[str, int] | None = None) -> None:
    """Issue a `UserWarning` at a file and a line, or else at the nearest caller outside of this package."""
    issued = _ISSUED.get()
    if issued is not None:
        issued.append(IssuedWarning(text, place))
    if place is not None:
        warnings.warn_explicit(text, UserWarning, *place)
        return
    frame, stacklevel = sys._getframe(1), 2
    while frame.f_back is not None and os.path.realpath(frame.f_code.co_filename).startswith(_FILES):
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(text, UserWarning, stacklevel=stacklevel)


@contextmanager
def recorded_warnings() -> Iterator[list[IssuedWarning]]:
    """Yield a list to which every warning of `warn_user` is added as it is issued."""
    issued = list[IssuedWarning]()
    token = _ISSUED.set(issued)
    try:
        yield issued
    finally:
        _ISSUED.reset(token)


def repeat(issued: Iterable[IssuedWarning]) -> None:
    """Issue warnings again, once for equal ones."""
    for warning in dict.fromkeys(issued):
        warn_user(warning.text, warning.place)
