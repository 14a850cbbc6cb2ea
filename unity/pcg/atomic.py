"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from unity.pcg.errors import PlanError


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file so that a crash leaves the old one: to a temporary file beside it, which then takes its name."""
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name + ".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(target.stat().st_mode if target.exists() else 0o666 & ~_umask())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def save(path: str | os.PathLike[str], content: str | bytes) -> None:
    """The same of a file that a user named. Raises PlanError if it cannot be written."""
    try:
        write(path, content)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}") from error


def _umask() -> int:
    """The permissions that new files do not get. (It can only be read by setting it.)"""
    found = os.umask(0)
    os.umask(found)
    return found
