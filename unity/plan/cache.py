"""What was found before is read instead of found again: plans, and how a program's equations were joined to operators.

Plans are plan files, named by a hash of everything that a search depends on, unity's own code included. So are clusters: to trace
the function again cannot be spared, but to prove again which equations may be joined can.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
import platformdirs

from unity.base.atomic_files import write
from unity.base.errors import PlanError
from unity.base.installation import PACKAGE
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.capture.clustering import EquationCluster, clusters, restored
from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.parameter_text import text_of
from unity.pcg.types.factors import TABLE, Entry
from unity.plan.plan_family import PlanFamily
from unity.plan.plan_file import content, read, restore, sealed
from unity.search.cost.cost import Training
from unity.search.session import Candidate
from unity.substitutions.language.library import Library

# The folders whose code decides what a search finds.
CODE = ("base", "pcg", "machine", "search", "substitutions", "verify", "transforms", "constraints", "baselines")


def _code() -> str:
    """Stands for the code that decides: what another version of it found is not looked at. Users' own operators decide, too."""
    own = (text_of([e.name, e.spec, e.local], lambda value: None) for e in TABLE.values() if not _ours(e))
    return "\n".join((_package(), *sorted(own)))


def _ours(entry: Entry) -> bool:
    return entry.spec.__module__.partition(".")[0] == __name__.partition(".")[0]


@cache
def _package() -> str:
    """The same of unity itself. (To read it all takes too long.)"""
    here = PACKAGE
    files = ((path, path.stat()) for part in CODE for path in sorted((here / part).rglob("*.py")))
    return repr([jax.__version__, *((str(path.relative_to(here)), stat.st_size, stat.st_mtime_ns) for path, stat in files)])


def entry(captured: Captured, machine: Machine, training: Training, settings: dict[str, Any]) -> Path:
    """The file that holds, or would hold, a search's result."""
    parts = [_code(), captured.graph.key, sorted(captured.differentiated), machine.to_json(), repr(training), settings]
    name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    return _folder() / "plans" / f"{name}.json"


def _folder() -> Path:
    return Path(platformdirs.user_cache_dir("unity"))


def clustered(body: Body, constant: Mapping[int, int]) -> list[EquationCluster]:
    """The operators of a body, as they were found before, or found now. A damaged entry is replaced."""
    name = hashlib.sha256("\n".join((_code(), body.key)).encode()).hexdigest()[:32]
    path = _folder() / "clusters" / f"{name}.json"
    try:
        return restored(body, constant, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        found = clusters(body, constant)
    _write(path, [cluster.members for cluster in found])
    return found


def recall(
    path: Path, captured: Captured, fn: Callable[..., Any], library: Callable[[], Library]
) -> tuple[PlanFamily, Candidate] | None:
    """What an entry holds; None if there is none, or none that may be read. A damaged entry is set aside, where the cache can be
    written, and the search done again.

    `library`: gives the rules of the plan's rewriting, and is asked only if it has one.
    """
    if not os.path.exists(path):  # Path.exists raises where a folder on the way may not be looked into
        return None
    try:
        return restore(path, read(path), captured, fn, library)
    except PlanError:
        with suppress(OSError):
            path.replace(path.with_suffix(".corrupt"))
        return None


def keep(path: Path, made: PlanFamily, chosen: Candidate) -> None:
    """Writes an entry."""
    _write(path, sealed(content(made, chosen, False)))


def _write(path: Path, data: Any) -> None:
    """A cache that cannot be written is no reason to fail."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(data))
    except OSError:
        return
