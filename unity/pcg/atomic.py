"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file so that a crash leaves the old one: to a temporary file beside it, which then takes its name."""
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name + ".", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(target.stat().st_mode if target.exists() else 0o666 & ~_umask())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The permissions that new files do not get. (It can only be read by setting it.)"""
    found = os.umask(0)
    os.umask(found)
    return found
