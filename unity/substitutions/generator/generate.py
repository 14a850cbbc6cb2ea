"""Generation of the whole library: families in parallel, without rules that follow from others, each rule proved and executed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from unity.base.installation import VERSION
from unity.substitutions.generator.discover import DiscoveredRule, minimal
from unity.substitutions.generator.family import Family
from unity.substitutions.generator.workers import FamilyTask, Outcome, VerifiedRule, Workers, prove, run
from unity.substitutions.language.library import Library, LibraryEntry
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, Term, applications
from unity.substitutions.language.text import parse_rule, print_body, print_rule

Report = Callable[[str, float], None]  # the current task, and the completed fraction
FIRST = 2  # families whose rules the others build on


def silent(text: str, part: float) -> None:
    """Report nothing."""


def generate(
    families: Sequence[Family],
    axioms: Sequence[Rule],
    folder: str | Path | None = None,
    processes: int = 2,
    report: Report = silent,
) -> tuple[Library, list[Outcome]]:
    """Generate the library of some families, and return it with the outcome of each.

    `Library.made` names the pairs that are equal but not proved, and the families that failed. Rules have the names that the
    generator makes of their operators; `Library.named_as` gives those that people gave.

    Args:
        families: the first two are enumerated first, since the others build on their rules.
        axioms: the rules from which all others are proved.
        folder: where the outcome of each family is saved, so that an interrupted run can be resumed.
        processes: how many work in parallel.
        report: is called with the current task and the completed fraction.
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
        rules = minimal(_all_rules(outcomes), lambda text: report(text, 0.7))
        entries, rejected = _verified_entries(workers, rules, axioms, report)
    provenance = {
        "by": f"unity {VERSION}",
        "graphs": sum(o.counts.graphs for o in outcomes),
        "pairs": sum(o.counts.distinct for o in outcomes),
        "open": sorted({text for o in outcomes for text in o.opened} | set(rejected)),
        "failed": [f"{o.family}: {o.failed}" for o in outcomes if o.failed],
        "families": [f.name for f in families],
    }
    report(f"{len(entries)} rules in {time.perf_counter() - start:.0f} s", 1.0)
    return Library(tuple(entries), provenance), outcomes


def _outcomes(workers: Workers, families: Sequence[Family], axioms: Sequence[Rule], folder: str | None) -> Iterator[Outcome]:
    """Yield the outcomes of the first families, each of which knows the rules of those before it, then of the rest, in parallel."""
    texts = tuple(map(print_rule, axioms))
    known: tuple[str, ...] = ()
    for family in families[:FIRST]:
        (outcome,) = workers.map(run, [FamilyTask(family, texts, known, folder)], _failed)
        yield outcome
        rules = [DiscoveredRule(parse_rule(text), "known", 0) for text in known]
        rules += [DiscoveredRule(parse_rule(f"{family.name}.{k} {text}"), "known", 0) for k, (text, _) in enumerate(outcome.rules)]
        known = tuple(print_rule(r.rule) for r in minimal(rules))
    yield from workers.map(run, [FamilyTask(family, texts, known, folder) for family in families[FIRST:]], _failed)


def _failed(task: FamilyTask, why: str) -> Outcome:
    return Outcome(task.family.name, failed=why)


def _all_rules(outcomes: Sequence[Outcome]) -> list[DiscoveredRule]:
    """Return the rules of all families, with different names, the small ones first."""
    texts = {text: (o.family, size) for o in reversed(outcomes) for text, size in o.rules}
    rules = [DiscoveredRule(parse_rule(f"rule {text}"), family, size) for text, (family, size) in texts.items()]
    rules.sort(key=lambda r: (len(applications(r.rule.sides)), print_body(r.rule)))
    return [replace(r, rule=rule) for r, rule in zip(rules, named(r.rule for r in rules), strict=True)]


def _verified_entries(
    workers: Workers, rules: Sequence[DiscoveredRule], axioms: Sequence[Rule], report: Report
) -> tuple[list[LibraryEntry], list[str]]:  # fmt: skip
    """Verify every rule once more. Return the library's entries, and the rules that are not proved, with the reasons."""
    texts = tuple(map(print_rule, axioms))
    results = workers.map(prove, [(print_rule(r.rule), texts) for r in rules], lambda task, why: VerifiedRule("open", why=why))
    entries: list[LibraryEntry] = []
    rejected: list[str] = []
    for number, (r, result) in enumerate(zip(rules, results, strict=True)):
        report(f"proofs: {number} of {len(rules)} rules", 0.8 + 0.2 * number / len(rules))
        if result.status == "proved":
            origin = {"family": r.family, "operators": r.operators}
            entries.append(LibraryEntry(r.rule, result.axioms, result.work, result.instances, origin))
        else:
            rejected.append(f"{print_body(r.rule)}: {result.status}, {result.why}")
    return sorted(entries, key=lambda e: e.rule.name), rejected


# Names


def name_of(rule: Rule) -> str:
    """Return the name of a rule: `operators-of-the-left.is.operators-of-the-right`."""
    return f"{_operators(rule.left)}.is.{_operators(rule.right)}"


def _operators(terms: Iterable[Term]) -> str:
    words: list[str] = []

    def visit(term: Term) -> None:
        if isinstance(term, Apply):
            words.append(str(term.attributes[0]) if term.operator == "map" else term.operator.replace("_", ""))
            for operand in term.operands:
                visit(operand)

    for term in terms:
        visit(term)
    return "-".join(words) or "itself"


def named(rules: Iterable[Rule]) -> list[Rule]:
    """Return rules with different names: those of equal operators are numbered, in order."""
    counts: dict[str, int] = {}
    result = []
    for rule in rules:
        name = name_of(rule)
        counts[name] = counts.get(name, 0) + 1
        result.append(replace(rule, name=name if counts[name] == 1 else f"{name}.{counts[name]}"))
    return result
