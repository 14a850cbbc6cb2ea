"""The parts of a generation that processes do side by side. What a family gave is kept, so that an interrupted run goes on.

A process that dies (Z3 out of memory, say) takes its task with it and no other: the task is reported, and the run goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from unity.base.atomic_files import write
from unity.base.installation import PACKAGE
from unity.substitutions.generator.discover import Counts, discover
from unity.substitutions.generator.family import Family
from unity.substitutions.language.text import parse_rule, print_body
from unity.verify.proofs.first_order import Prover
from unity.verify.proofs.library import verified

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Task:
    """A family to look through, with what is known already. Rules are text here: that is what processes send each other."""

    family: Family
    axioms: tuple[str, ...]
    known: tuple[str, ...]
    folder: str | None

    @property
    def digest(self) -> str:
        """A hash of all that the result depends on."""
        text = repr((_code(), self.family, self.axioms, self.known))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _code() -> str:
    """A hash of the code that the result depends on."""
    files = sorted(path for name in ("pcg", "substitutions", "verify") for path in (PACKAGE / name).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@dataclass(frozen=True)
class Outcome:
    """The rules of a family (text, number of operators), its counts, what is equal but not proved, and why it failed if it did."""

    family: str
    rules: tuple[tuple[str, int], ...] = ()
    counts: Counts = field(default_factory=Counts)
    opened: tuple[str, ...] = ()
    failed: str = ""


def run(task: Task) -> Outcome:
    """One family, from the work folder if it was done before."""
    path = Path(task.folder) / f"{task.digest}.json" if task.folder else None
    if path and (known := _read(path)):
        return known
    axioms, known_rules = ([parse_rule(text) for text in texts] for texts in (task.axioms, task.known))
    rules, counts, opened = discover(task.family, axioms, known_rules)
    found = tuple((print_body(f.rule), f.operators) for f in rules)
    outcome = Outcome(task.family.name, found, counts, tuple(map(print_body, opened)))
    if path:
        write(path, json.dumps(asdict(outcome)))
    return outcome


def _read(path: Path) -> Outcome | None:
    """What was kept. None if nothing was, or what is there cannot be read."""
    try:
        data = json.loads(path.read_text())
        rules = tuple((str(text), int(size)) for text, size in data["rules"])
        return Outcome(str(data["family"]), rules, Counts(**data["counts"]), tuple(data["opened"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Proved:
    """One rule's last two layers: the axioms used and the work of the proof, and at how many instances it was executed."""

    status: str
    axioms: tuple[str, ...] = ()
    work: int = 0
    instances: int = 0
    why: str = ""


def prove(task: tuple[str, tuple[str, ...]]) -> Proved:
    """A rule (as text) proved from axioms (as text), this time noting which, and executed on all small shapes.

    By a prover of its own: what one has learned from other rules would change which axioms it uses.
    """
    text, axioms = task
    found = verified(parse_rule(text), Prover(map(parse_rule, axioms), cores=True))
    return Proved(found.status, found.proof.axioms, found.proof.work, found.check.instances, found.why)


class Workers:
    """A pool of processes that survives the death of one."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.pool = self._new()

    def _new(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.processes, mp_context=get_context("spawn"))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *problem: Any) -> None:
        self.pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[T], R], tasks: Sequence[T], failed: Callable[[T, str], R]) -> Iterator[R]:
        """Results in order. A task whose process died, or that raised, gives what `failed` makes of it."""
        pool = self.pool
        futures = [pool.submit(function, task) for task in tasks]
        for task, future in zip(tasks, futures, strict=True):
            yield self._result(function, task, future, pool, failed)

    def _result(
        self, function: Callable[[T], R], task: T, future: Future[R], pool: ProcessPoolExecutor, failed: Callable[[T, str], R]
    ) -> R:
        """A future's result. Where a process died it may have been for another task: this one gets a second try, alone."""
        for last in (False, True):
            try:
                return future.result()
            except BrokenProcessPool:
                if pool is self.pool:
                    self.pool = self._new()
                if not last:
                    pool = self.pool
                    future = pool.submit(function, task)
            except Exception as problem:
                return failed(task, f"{type(problem).__name__}: {problem}")
        return failed(task, "its process died")
