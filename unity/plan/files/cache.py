"""The on-disk cache of plans, and of the clusters of equations that form a program's operators.

An entry's name is a hash of everything that its content depends on, unity's own code included. Plans are stored as plan files.
Clusters are stored because a function must be traced again in every process, but the proofs of which of its equations form one
operator need not be repeated.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
import platformdirs
from msgspec.structs import asdict

from unity.base.atomic_files import write
from unity.base.documents import encoded, parsed, typed
from unity.base.errors import PlanError, PlanFileError
from unity.base.installation import PACKAGE
from unity.base.user_warnings import IssuedWarning
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.capture.clustering import EquationCluster, clusters, restored
from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.parameter_text import text_of
from unity.pcg.operators.table import BUILT_IN, TABLE
from unity.plan.files.document import CachedPlan
from unity.plan.files.plan_file import document_of, read, restore, written
from unity.plan.plan_family import PlanFamily
from unity.search.cost.cost import Training
from unity.search.session import Candidate
from unity.substitutions.language.library import Library

# The folders whose code determines the result of a search.
CODE = ("base", "pcg", "machine", "search", "substitutions", "verify", "transforms", "constraints", "planning", "baselines")


def _code_version() -> str:
    """Return a text that identifies the code that entries depend on, including operators that the user registered or removed.

    An entry written by another version of that code has another name, and so is never read.
    """
    registered = (e for name, e in TABLE.items() if BUILT_IN.get(name) is not e)
    texts = (text_of([e.name, e.spec, e.local, e.exact, repr(e.facts)], lambda value: None) for e in registered)
    return "\n".join((_package_version(), *sorted(texts), *sorted(BUILT_IN.keys() - TABLE.keys())))


@cache
def _package_version() -> str:
    """Return a text that identifies the files of unity itself, by size and time of change: reading them all takes too long."""
    files = ((path, path.stat()) for part in CODE for path in sorted((PACKAGE / part).rglob("*.py")))
    return repr([jax.__version__, *((str(path.relative_to(PACKAGE)), stat.st_size, stat.st_mtime_ns) for path, stat in files)])


def entry(captured: Captured, machine: Machine, training: Training, settings: dict[str, Any]) -> Path:
    """Return the path of the file that holds, or would hold, a search's result."""
    parts = [_code_version(), captured.graph.key, sorted(captured.differentiated), machine.to_json(), repr(training), settings]
    name = hashlib.sha256(encoded(parts, "sorted")).hexdigest()[:32]
    return _folder() / "plans" / f"{name}.json"


def _folder() -> Path:
    return Path(platformdirs.user_cache_dir("unity"))


def clustered(body: Body, constant: Mapping[int, int]) -> list[EquationCluster]:
    """Return the operators of a body, read from the cache if they are there. A missing or damaged entry is written anew."""
    name = hashlib.sha256("\n".join((_code_version(), body.key)).encode()).hexdigest()[:32]
    path = _folder() / "clusters" / f"{name}.json"
    try:
        return restored(body, constant, typed(parsed(path.read_bytes()), list[list[int]]))
    except (OSError, ValueError, PlanFileError):
        operators = clusters(body, constant)
    _write(path, encoded([cluster.members for cluster in operators]))
    return operators


def recall(
    path: Path, captured: Captured, fn: Callable[..., Any], library: Callable[[], Library]
) -> tuple[PlanFamily, Candidate, tuple[IssuedWarning, ...]] | None:
    """Return the plan in an entry and the warnings of its search, or None if the entry is missing, unreadable or damaged.

    A damaged entry is renamed with the suffix `.corrupt`, where the cache is writable, so that the search writes a new one.

    Args:
        path: the entry, as `entry` names it.
        captured: the function as captured now.
        fn: the function.
        library: returns the rules of the plan's rewriting. It is called only if the plan has one.
    """
    if not os.path.exists(path):  # Path.exists raises where a parent folder may not be read
        return None
    try:
        document = read(path, CachedPlan)
        plan = restore(path, document, captured, fn, library)
    except PlanError:
        with suppress(OSError):
            path.replace(path.with_suffix(".corrupt"))
        return None
    return *plan, document.warnings


def keep(path: Path, family: PlanFamily, chosen: Candidate, issued: Sequence[IssuedWarning]) -> None:
    """Write a plan into the cache, with the warnings that its search issued."""
    document = document_of(family, chosen, points=False)
    _write(path, written(CachedPlan(**asdict(document), warnings=tuple(issued))))


def _write(path: Path, text: bytes) -> None:
    """Write an entry, or do nothing where the cache is not writable: planning works without it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, text)
    except OSError:
        return
