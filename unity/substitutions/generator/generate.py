"""The whole library from nothing: families side by side, what follows from the rest left out, every rule proved and executed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from unity.base.installation import VERSION
from unity.substitutions.generator.discover import Found, minimal
from unity.substitutions.generator.family import Family
from unity.substitutions.generator.naming import named
from unity.substitutions.generator.work import Outcome, Proved, Task, Workers, prove, run
from unity.substitutions.language.library import Entry, Library
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import applications
from unity.substitutions.language.text import parse_rule, print_body, print_rule

Report = Callable[[str, float], None]  # what is done now, and the part of the whole that is done
FIRST = 2  # families that the others build on


def silent(text: str, part: float) -> None:
    """Reports nothing."""


def generate(
    families: Sequence[Family],
    axioms: Sequence[Rule],
    folder: str | Path | None = None,
    processes: int = 2,
    report: Report = silent,
) -> tuple[Library, list[Outcome]]:
    """The library of some families, and what became of each. The first ones go first: the others build on their rules.

    `folder` keeps what each family gave. What was equal but not proved, and what failed, is said in the library's `made`.
    """
    start = time.perf_counter()
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    with Workers(processes) as workers:
        for outcome in _outcomes(workers, families, axioms, str(folder) if folder else None):
            outcomes.append(outcome)
            text = f"{outcome.family}: {len(outcome.rules)} rules of {outcome.counts.graphs} graphs"
            report(text, 0.7 * len(outcomes) / len(families))
        found = minimal(_together(outcomes), lambda text: report(text, 0.7))
        entries, rejected = _proved(workers, found, axioms, report)
    made = {
        "by": f"unity {VERSION}",
        "graphs": sum(o.counts.graphs for o in outcomes),
        "pairs": sum(o.counts.distinct for o in outcomes),
        "open": sorted({text for o in outcomes for text in o.opened} | set(rejected)),
        "failed": [f"{o.family}: {o.failed}" for o in outcomes if o.failed],
        "families": [f.name for f in families],
    }
    report(f"{len(entries)} rules in {time.perf_counter() - start:.0f} s", 1.0)
    return Library(tuple(entries), made), outcomes


def _outcomes(workers: Workers, families: Sequence[Family], axioms: Sequence[Rule], folder: str | None) -> Iterator[Outcome]:
    """The first families one after another, each knowing the rules before it; then the rest, side by side."""
    texts = tuple(map(print_rule, axioms))
    known: tuple[str, ...] = ()
    for family in families[:FIRST]:
        (outcome,) = workers.map(run, [Task(family, texts, known, folder)], _failed)
        yield outcome
        found = [Found(parse_rule(text), "known", 0) for text in known]
        found += [Found(parse_rule(f"{family.name}.{k} {text}"), "known", 0) for k, (text, _) in enumerate(outcome.rules)]
        known = tuple(print_rule(f.rule) for f in minimal(found))
    yield from workers.map(run, [Task(family, texts, known, folder) for family in families[FIRST:]], _failed)


def _failed(task: Task, why: str) -> Outcome:
    return Outcome(task.family.name, failed=why)


def _together(outcomes: Sequence[Outcome]) -> list[Found]:
    """All families' rules, the small ones first, each with a name of its own."""
    texts = {text: (o.family, size) for o in reversed(outcomes) for text, size in o.rules}
    rules = [Found(parse_rule(f"rule {text}"), family, size) for text, (family, size) in texts.items()]
    rules.sort(key=lambda f: (len(applications(f.rule.sides)), print_body(f.rule)))
    return [replace(f, rule=rule) for f, rule in zip(rules, named(f.rule for f in rules), strict=True)]


def _proved(
    workers: Workers, found: Sequence[Found], axioms: Sequence[Rule], report: Report
) -> tuple[list[Entry], list[str]]:  # fmt: skip
    """Every rule proved once more and executed; and those that were not, with the reason."""
    texts = tuple(map(print_rule, axioms))
    results = workers.map(prove, [(print_rule(f.rule), texts) for f in found], lambda task, why: Proved("open", why=why))
    entries: list[Entry] = []
    rejected: list[str] = []
    for number, (f, result) in enumerate(zip(found, results, strict=True)):
        report(f"proofs: {number} of {len(found)} rules", 0.8 + 0.2 * number / len(found))
        if result.status == "proved":
            origin = {"family": f.family, "operators": f.operators}
            entries.append(Entry(f.rule, result.axioms, result.work, result.instances, origin))
        else:
            rejected.append(f"{print_body(f.rule)}: {result.status}, {result.why}")
    return sorted(entries, key=lambda e: e.rule.name), rejected
