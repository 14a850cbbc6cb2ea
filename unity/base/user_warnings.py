"""Warnings at the user's line, however deep in this package they are issued."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1])


def warn_user(text: str) -> None:
    """Issue a `UserWarning` at the nearest caller outside of this package."""
    frame, stacklevel = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(text, UserWarning, stacklevel=stacklevel)
