"""Errors of command lines that argparse accepts."""

from __future__ import annotations

import traceback
from pathlib import Path

from unity.base.errors import UnityError


class CommandError(UnityError):
    """An error of a name on the command line that does not exist or cannot be used. The message says what is expected."""

    docs = "command-line"


def user_code_error(which: str, error: BaseException, inside: str) -> CommandError:
    """Return an exception of the user's own code as one message, with the innermost line in the user's folder.

    Args:
        which: the module or function that raised it.
        error: the exception.
        inside: the folder of the user's module.
    """
    folder = Path(inside).resolve()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if folder in Path(f.filename).resolve().parents]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return CommandError(f"{which} raises {type(error).__name__}: {error}{where}")
