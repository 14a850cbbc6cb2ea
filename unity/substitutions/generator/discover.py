"""The rules of one family: graphs are enumerated, equal ones are paired, and a pair that no known rule derives becomes a rule."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unity.substitutions.generator.candidates import CandidateRule, candidate, confirmed, generalized, written_candidate
from unity.substitutions.generator.enumeration import Enumeration
from unity.substitutions.generator.family import Family
from unity.substitutions.language.matching import match
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Variable, applications, subterms
from unity.verify.proofs.first_order import Prover

Report = Callable[[str], None]


@dataclass(frozen=True)
class DiscoveredRule:
    """A rule with the family and the number of operators at which it was discovered."""

    rule: Rule
    family: str
    operators: int


@dataclass
class PairCounts:
    """Counts of the pairs of a family, by their fate."""

    graphs: int = 0
    pairs: int = 0
    distinct: int = 0  # pairs that the rules cover and that share no operator, as TASO and Unity count them
    derived: int = 0
    chance: int = 0  # not confirmed at other shapes
    open: int = 0
    seconds: float = 0.0


def discover(
    family: Family, axioms: Sequence[Rule], known: Sequence[Rule] = (), report: Report = lambda text: None
) -> tuple[list[DiscoveredRule], PairCounts, list[Rule]]:
    """Return the new rules of a family, counts of its pairs, and the pairs that are equal but not proved."""
    start = time.perf_counter()
    prover, rng = Prover(axioms), np.random.default_rng(0)
    premises = Prover((r for r in known if _is_premise(r)), values=False)
    rules: list[DiscoveredRule] = []
    unproved: list[Rule] = []
    counts = PairCounts()
    enumeration = Enumeration(family)
    enumerated = ([c for pair in pairs if (c := candidate(pair, family))] for pairs in enumeration.levels())
    for size, candidates in enumerate(itertools.chain(enumerated, [[written_candidate(pair) for pair in family.written]]), 1):
        candidates.sort(key=lambda c: -len(c.types))  # the most general first: the others follow from it
        counts.pairs += len(candidates)
        for number, pair in enumerate(candidates):
            if number % 100 == 0:
                report(f"{family.name}, {size} operators: {number} of {len(candidates)} pairs, {len(rules)} rules")
            if _follows(pair.rule, premises, [*known, *(r.rule for r in rules)]):
                counts.derived += 1
                counts.distinct += not _shares_operator(pair.rule)
                continue
            rule = _accepted(pair, prover, rng, counts, unproved)
            if rule is not None:
                counts.distinct += not _shares_operator(pair.rule)
                rule = replace(rule, name=f"{family.name} {len(rules)}")
                rules.append(DiscoveredRule(rule, family.name, min(size, family.operators)))
                if _is_premise(rule):
                    premises.add(rule)
    counts.graphs, counts.seconds = enumeration.built, time.perf_counter() - start
    return rules, counts, unproved


def _accepted(
    pair: CandidateRule, prover: Prover, rng: np.random.Generator, counts: PairCounts, unproved: list[Rule]
) -> Rule | None:
    """Return a candidate's most general proved form. If it has no such form, count why, and return None."""
    rule = confirmed(pair, rng)
    if rule is None:
        counts.chance += 1
        return None
    rule, proof = generalized(pair, rule, prover, rng)
    if proof.status != "proved":
        counts.open += 1
        unproved.append(rule)
        return None
    return rule


def _is_premise(rule: Rule) -> bool:
    """Return whether rules that follow from this one are left out. They are not if in it one graph does the work of two."""
    return len(rule.left) == 1 or all(isinstance(t, Variable) for t in rule.right)


def _follows(rule: Rule, premises: Prover, rules: Iterable[Rule]) -> bool:
    """Return whether a rule follows from others by rewriting, or, if it has several outputs, whether it is an instance of one.

    (A rule with several outputs always follows from rules for each of them, but a search needs it as one step.)
    """
    if len(rule.left) > 1:
        return any(instance_of(rule, r) for r in rules)
    return premises.prove(rule).status == "proved"


def instance_of(rule: Rule, general: Rule) -> bool:
    """Return whether a rule is a general one with terms for its variables."""
    return match(general.sides, rule.sides) is not None


def _shares_operator(rule: Rule) -> bool:
    """Return whether the sides share an operator, so that the rule follows from a smaller one (TASO section 3.3)."""
    left, right = ({t for t in subterms(side) if t in applications(side)} for side in (rule.left, rule.right))
    return bool(left & right)


def minimal(rules: Sequence[DiscoveredRule], report: Report = lambda text: None) -> list[DiscoveredRule]:
    """Return rules without those that follow from the others. Larger rules are removed first.

    A rule may follow from one that is removed later, because that one follows too, but not from the rest in one proof, since
    patterns fire only on terms of the goal. Such a rule is restored, so that every removed rule is one proof away.
    """
    prover = Prover((r.rule for r in rules if _is_premise(r.rule)), values=False, switches=True)
    order = sorted(rules, key=lambda r: (-len(applications(r.rule.sides)), -len(r.rule.variables)))
    removed: dict[str, Rule] = {}

    def follows(rule: Rule) -> bool:
        if len(rule.left) > 1 and not _is_premise(rule):
            others = (r.rule for r in rules if r.rule.name not in removed and r.rule.name != rule.name)
            return any(len(other.left) > 1 and instance_of(rule, other) for other in others)
        return prover.prove(rule, frozenset({*removed, rule.name})).status == "proved"

    for number, discovered in enumerate(order):
        if number % 10 == 0:
            report(f"removing rules that follow from others: {number} of {len(order)} rules, {len(removed)} removed")
        if follows(discovered.rule):
            removed[discovered.rule.name] = discovered.rule
    for rule in reversed(list(removed.values())):
        if not follows(rule):
            del removed[rule.name]
    return [r for r in rules if r.rule.name not in removed]
