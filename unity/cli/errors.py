"""What is wrong with a command line that argparse could read."""

from __future__ import annotations

import traceback
from pathlib import Path

from unity.base.errors import UnityError


class CommandError(UnityError):
    """What a command line names is not there, or cannot be used: which, why, and what is expected."""

    docs = "command-line"


def blamed(which: str, error: BaseException, inside: str) -> CommandError:
    """An error of the user's own code as one message: what raised it, and the innermost line that lies in the folder `inside`."""
    folder = Path(inside).resolve()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if folder in Path(f.filename).resolve().parents]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return CommandError(f"{which} raises {type(error).__name__}: {error}{where}")
