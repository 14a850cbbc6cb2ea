"""A pool of processes that discover and prove rules. The result of each family is saved, so an interrupted run can be resumed.

If a process dies, for instance because Z3 is out of memory, its task alone fails: it is reported, and the run continues.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from unity.base.atomic_files import write
from unity.base.documents import encoded, parsed, typed
from unity.base.errors import PlanFileError
from unity.base.installation import PACKAGE
from unity.substitutions.generator.discover import PairCounts, discover
from unity.substitutions.generator.family import Family
from unity.substitutions.language.text import parse_rule, print_body
from unity.verify.proofs.first_order import Prover
from unity.verify.proofs.library import verified

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class FamilyTask:
    """A family to enumerate, and the rules that are known. Rules are texts, which processes can send to each other."""

    family: Family
    axioms: tuple[str, ...]
    known: tuple[str, ...]
    folder: str | None

    @property
    def digest(self) -> str:
        """A hash of everything that the result depends on."""
        text = repr((_code_hash(), self.family, self.axioms, self.known))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _code_hash() -> str:
    """Return a hash of the code that the result depends on."""
    files = sorted(path for name in ("pcg", "substitutions", "verify") for path in (PACKAGE / name).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@dataclass(frozen=True)
class Outcome:
    """The result of a family: rules as (text, number of operators), counts, equal pairs without a proof, and why it failed."""

    family: str
    rules: tuple[tuple[str, int], ...] = ()
    counts: PairCounts = field(default_factory=PairCounts)
    opened: tuple[str, ...] = ()
    failed: str = ""


def run(task: FamilyTask) -> Outcome:
    """Discover the rules of a family, or read them from the folder of an earlier run."""
    path = Path(task.folder) / f"{task.digest}.json" if task.folder else None
    if path and (saved := _read(path)):
        return saved
    axioms, known_rules = ([parse_rule(text) for text in texts] for texts in (task.axioms, task.known))
    rules, counts, unproved = discover(task.family, axioms, known_rules)
    texts = tuple((print_body(r.rule), r.operators) for r in rules)
    outcome = Outcome(task.family.name, texts, counts, tuple(map(print_body, unproved)))
    if path:
        write(path, encoded(outcome))
    return outcome


def _read(path: Path) -> Outcome | None:
    """Read a saved outcome. Returns None if it is missing or unreadable."""
    try:
        return typed(parsed(path.read_bytes()), Outcome)
    except (OSError, PlanFileError):
        return None


@dataclass(frozen=True)
class VerifiedRule:
    """The verdict on a rule: the axioms and the work of its proof, and the number of instances at which it was executed."""

    status: str
    axioms: tuple[str, ...] = ()
    work: int = 0
    instances: int = 0
    why: str = ""


def prove(task: tuple[str, tuple[str, ...]]) -> VerifiedRule:
    """Verify a rule from axioms, both as text, and note the axioms that it uses.

    Each rule has a new prover: one that has learned from other rules might use other axioms.
    """
    text, axioms = task
    result = verified(parse_rule(text), Prover(map(parse_rule, axioms), cores=True))
    return VerifiedRule(result.status, result.proof.axioms, result.proof.work, result.check.instances, result.why)


class Workers:
    """A pool of processes that survives the death of any of them."""

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
        """Yield the results in order. For a task that raised or whose process died, the result is `failed(task, reason)`."""
        pool = self.pool
        futures = [pool.submit(function, task) for task in tasks]
        for task, future in zip(tasks, futures, strict=True):
            yield self._result(function, task, future, pool, failed)

    def _result(
        self, function: Callable[[T], R], task: T, future: Future[R], pool: ProcessPoolExecutor, failed: Callable[[T, str], R]
    ) -> R:
        """Return a future's result. If a process died, perhaps of another task, this one gets a second try, alone."""
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
