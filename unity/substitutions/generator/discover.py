"""The rules of one family: graphs are enumerated, equal ones paired, and a pair kept if nothing known derives it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unity.substitutions.generator.candidates import Candidate, by_hand, candidate, confirmed, proved
from unity.substitutions.generator.enumeration import Enumeration
from unity.substitutions.generator.family import Family
from unity.substitutions.language.matching import match
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Variable, applications, subterms
from unity.verify.proofs.first_order import Prover

Report = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A rule, and how it was found."""

    rule: Rule
    family: str
    operators: int


@dataclass
class Counts:
    """What became of the pairs of a family."""

    graphs: int = 0
    pairs: int = 0
    distinct: int = 0  # pairs that the rules cover and that share no operator: those that TASO and Unity would count
    derived: int = 0
    chance: int = 0  # not confirmed at other shapes
    open: int = 0
    seconds: float = 0.0


def discover(
    family: Family, axioms: Sequence[Rule], known: Sequence[Rule] = (), report: Report = lambda text: None
) -> tuple[list[Found], Counts, list[Rule]]:
    """The rules of a family beyond those known, what became of its pairs, and the pairs that are equal but were not proved."""
    start = time.perf_counter()
    prover, rng = Prover(axioms), np.random.default_rng(0)
    premises = Prover((r for r in known if _premise(r)), values=False)
    rules: list[Found] = []
    opened: list[Rule] = []
    counts = Counts()
    enumeration = Enumeration(family)
    enumerated = ([c for found in equal if (c := candidate(found, family))] for equal in enumeration.levels())
    for size, candidates in enumerate(itertools.chain(enumerated, [[by_hand(g) for g in family.given]]), 1):
        candidates.sort(key=lambda c: -len(c.types))  # the most general first: the others follow from it
        counts.pairs += len(candidates)
        for number, found in enumerate(candidates):
            if number % 100 == 0:
                report(f"{family.name}, {size} operators: {number} of {len(candidates)} pairs, {len(rules)} rules")
            if _follows(found.rule, premises, [*known, *(f.rule for f in rules)]):
                counts.derived += 1
                counts.distinct += not _shares(found.rule)
                continue
            rule = _accepted(found, prover, rng, counts, opened)
            if rule is not None:
                counts.distinct += not _shares(found.rule)
                rule = replace(rule, name=f"{family.name} {len(rules)}")
                rules.append(Found(rule, family.name, min(size, family.operators)))
                if _premise(rule):
                    premises.add(rule)
    counts.graphs, counts.seconds = enumeration.built, time.perf_counter() - start
    return rules, counts, opened


def _accepted(found: Candidate, prover: Prover, rng: np.random.Generator, counts: Counts, opened: list[Rule]) -> Rule | None:
    """A candidate's most general proved form; None (and counted) if it has none."""
    rule = confirmed(found, rng)
    if rule is None:
        counts.chance += 1
        return None
    rule, proof = proved(found, rule, prover, rng)
    if proof.status != "proved":
        counts.open += 1
        opened.append(rule)
        return None
    return rule


def _premise(rule: Rule) -> bool:
    """Whether other rules are left out for following from this one: not from a graph that does the work of two."""
    return len(rule.left) == 1 or all(isinstance(t, Variable) for t in rule.right)


def _follows(rule: Rule, premises: Prover, rules: Iterable[Rule]) -> bool:
    """Whether a rule follows from those found: by rewriting, or, where one graph does the work of two, as an instance.

    (Such a rule always follows from those of its outputs one by one. But a search needs it as a step of its own.)
    """
    if len(rule.left) > 1:
        return any(instance_of(rule, r) for r in rules)
    return premises.prove(rule).status == "proved"


def instance_of(rule: Rule, general: Rule) -> bool:
    """Whether a rule is another one with terms for its variables."""
    return match(general.sides, rule.sides) is not None


def _shares(rule: Rule) -> bool:
    """Whether the sides have an operator in common, so that the rule follows from a smaller one (TASO section 3.3)."""
    left, right = ({t for t in subterms(side) if t in applications(side)} for side in (rule.left, rule.right))
    return bool(left & right)


def minimal(rules: Sequence[Found], report: Report = lambda text: None) -> list[Found]:
    """Rules without those that follow from the others. What is larger goes first.

    What followed from a rule that went later, because that one followed too, need not follow at once (patterns fire only on terms
    that are there): such a rule comes back. So whatever is left out is one proof away.
    """
    prover = Prover((f.rule for f in rules if _premise(f.rule)), values=False, switches=True)
    order = sorted(rules, key=lambda f: (-len(applications(f.rule.sides)), -len(f.rule.variables)))
    gone: dict[str, Rule] = {}

    def follows(rule: Rule) -> bool:
        if len(rule.left) > 1 and not _premise(rule):
            others = (f.rule for f in rules if f.rule.name not in gone and f.rule.name != rule.name)
            return any(len(other.left) > 1 and instance_of(rule, other) for other in others)
        return prover.prove(rule, frozenset({*gone, rule.name})).status == "proved"

    for number, found in enumerate(order):
        if number % 10 == 0:
            report(f"what follows from the rest: {number} of {len(order)} rules, {len(gone)} gone")
        if follows(found.rule):
            gone[found.rule.name] = found.rule
    for rule in reversed(list(gone.values())):
        if not follows(rule):
            del gone[rule.name]
    return [f for f in rules if f.rule.name not in gone]
