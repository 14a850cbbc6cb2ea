"""Warnings at the user's line, however deep in this package they are issued."""

from __future__ import annotations

import os
import sys
import warnings

from unity.base.installation import PACKAGE

_FILES = str(PACKAGE) + os.sep


def warn_user(text: str) -> None:
    """Issue a `UserWarning` at the nearest caller outside of this package."""
    frame, stacklevel = sys._getframe(1), 2
    while frame.f_back is not None and os.path.realpath(frame.f_code.co_filename).startswith(_FILES):
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(text, UserWarning, stacklevel=stacklevel)
