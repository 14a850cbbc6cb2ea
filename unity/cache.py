"""The plan cache: a search that was done before, for the same graph, machine and settings, is read instead of repeated.

Entries are plan files, named by a hash of everything that a search depends on, the version of unity included.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs

from unity.pcg.atomic import write
from unity.pcg.capture import Captured
from unity.pcg.errors import PlanError
from unity.plan import Made
from unity.planfile import content, read, restore
from unity.search.cost import Training
from unity.search.machine import Machine
from unity.search.session import Candidate
from unity.substitutions.library import Library

VERSION = "0.1.0"


def entry(captured: Captured, machine: Machine, training: Training, settings: dict[str, Any]) -> Path:
    """The file that holds, or would hold, a search's result."""
    parts = [VERSION, captured.graph.key, sorted(captured.differentiated), machine.to_json(), repr(training), settings]
    name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    return Path(platformdirs.user_cache_dir("unity")) / "plans" / f"{name}.json"


def recall(path: Path, captured: Captured, fn: Callable[..., Any], library: Library) -> tuple[Made, Candidate] | None:
    """What an entry holds; None if there is none. A damaged entry is set aside, and the search done again."""
    if not path.exists():
        return None
    try:
        return restore(path, read(path), captured, fn, library)
    except PlanError:
        path.replace(path.with_suffix(".corrupt"))
        return None


def keep(path: Path, made: Made, chosen: Candidate) -> None:
    """Writes an entry. A cache that cannot be written is no reason to fail."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(content(made, chosen, False)))
    except OSError:
        return
