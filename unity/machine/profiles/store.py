"""Measurements on disk: one database in the user's cache folder, shared by all processes.

Each measurement is one transaction, so a run that is killed keeps its measurements. A damaged file is set aside with a warning, and
a new one begun: nothing is lost that cannot be measured again.
"""

from __future__ import annotations

import os
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import platformdirs

from unity.base.documents import encoded, parsed, typed
from unity.base.errors import PlanFileError, UnityError
from unity.machine.profiles.profile import SCHEMA, Measurement, Profile, Where

T = TypeVar("T")

WAIT = 60.0  # seconds that a process waits for another's transaction, which takes milliseconds
TABLE = (
    "CREATE TABLE IF NOT EXISTS measurements"
    " (place TEXT NOT NULL, content TEXT NOT NULL, row TEXT NOT NULL, PRIMARY KEY (place, content)) WITHOUT ROWID"
)
PUT = "INSERT INTO measurements VALUES (?, ?, ?) ON CONFLICT (place, content) DO UPDATE SET row = excluded.row"
GET = "SELECT row FROM measurements WHERE place = ? ORDER BY content"


class ProfileError(UnityError):
    """Measurements cannot be made or stored. The message says why, and what to do."""

    docs = "costs"


def usual_path() -> Path:
    """Return the path of the user's database; each schema has its own."""
    return platformdirs.user_cache_path("unity") / f"profiles-{SCHEMA}.sqlite3"


@dataclass(frozen=True)
class Store:
    """A database of measurements at a path, created when it is first written."""

    path: Path

    @staticmethod
    def usual() -> Store:
        """Return the user's own store."""
        return Store(usual_path())

    def put(self, where: Where, measurement: Measurement) -> None:
        """Store a measurement, replacing an older one of the same operator. Raises ProfileError if the file cannot be written."""
        row = encoded(measurement).decode()

        def write(database: sqlite3.Connection) -> None:
            with database:
                database.execute(PUT, (where.key, measurement.key, row))

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProfileError(f"{self.path.parent}: {error.strerror}; measurements cannot be kept there") from error
        self._safely(write)

    def profile(self, where: Where) -> Profile | None:
        """Return all measurements under some conditions, or None. Raises ProfileError if the file cannot be read."""
        if not os.path.exists(self.path):  # Path.exists raises where a folder on the way may not be looked into
            return None
        rows = self._safely(lambda database: database.execute(GET, (where.key,)).fetchall())
        measurements = tuple(m for (row,) in rows if (m := _row(row)) is not None)
        return Profile(where, measurements) if measurements else None

    def _safely(self, use: Callable[[sqlite3.Connection], T]) -> T:
        """Use the database, and once more with a new one if it turns out to be damaged."""
        inode = _inode(self.path)
        try:
            with self._opened() as database:
                return use(database)
        except sqlite3.OperationalError as error:  # locked for too long, no permission, no room
            raise ProfileError(f"{self.path}: {error}; the file is {_ADVICE}") from error
        except sqlite3.DatabaseError as error:
            self._set_aside(inode, error)
        try:
            with self._opened() as database:
                return use(database)
        except sqlite3.DatabaseError as error:
            raise ProfileError(f"{self.path}: {error}; the file is {_ADVICE}") from error

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=WAIT)) as database:
            database.execute("PRAGMA journal_mode = WAL")  # readers and a writer at once
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute(TABLE)
            yield database

    def _set_aside(self, damaged: int | None, error: Exception) -> None:
        """Rename the damaged file, given by its inode, unless another process has done so since."""
        if damaged is None or _inode(self.path) != damaged:
            return
        aside = self.path.with_name(self.path.name + ".corrupt")
        try:
            os.replace(self.path, aside)
        except FileNotFoundError:  # another process was faster
            return
        except OSError as refused:
            raise ProfileError(f"{self.path}: {error}, and {refused.strerror}; the file is {_ADVICE}") from refused
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        warnings.warn(f"{self.path}: {error}; set aside as {aside}, what it held will be measured again", stacklevel=4)


_ADVICE = "a cache: it may be deleted, and another place is chosen by XDG_CACHE_HOME"


def _inode(path: Path) -> int | None:
    """Return the inode number, which tells a file from its replacement of the same name."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _row(text: str) -> Measurement | None:
    """Parse a stored measurement. Returns None if it is damaged, so that it is measured again."""
    try:
        return typed(parsed(text.encode()), Measurement)
    except PlanFileError:
        return None
