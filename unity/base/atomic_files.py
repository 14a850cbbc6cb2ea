"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from unity.base.errors import PlanError


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file through a temporary one beside it, so that a crash leaves the old file intact."""
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


def path_of(path: str | os.PathLike[str]) -> Path:
    """Return a user's path as a `Path`. Raises PlanError for anything else, such as an open file."""
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise PlanError(f"path={path!r}: expected a path (a str or a pathlib.Path), got {type(path).__name__}. (docs: plan#files)")
    return Path(path)


def save(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file that a user named, whole or not at all. Raises PlanError if it cannot be written."""
    path_of(path)
    try:
        write(path, content)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}") from error


def _umask() -> int:
    """Return the permissions withheld from new files. The system tells them only when they are set."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
