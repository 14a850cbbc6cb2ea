"""Verdicts on rules over groups of dimensions: proved for every rank and size, refuted at an instance, open, or not expressible."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from unity.base.errors import RuleError
from unity.verify.ranks.execution import difference_by_jax
from unity.verify.ranks.instances import instances, refute
from unity.verify.ranks.prover import RankProof, prove
from unity.verify.ranks.rule import RankRule


@dataclass(frozen=True)
class RankVerdict:
    """The verdict on a rule: "proved", "refuted", "open", "ill-typed" or "not expressible", and the reason."""

    rule: RankRule
    status: str
    why: str
    proof: RankProof

    @property
    def expected(self) -> bool:
        """Whether the rule is proved, or not for the reason that its text gives."""
        return self.status in ("proved", "not expressible") or (self.status == "open" and bool(self.rule.unproved))


def verdict(rule: RankRule, execute: bool = False) -> RankVerdict:
    """Judge a rule.

    A proof counts only if the left side has a defined element at some instance: contradictory conditions prove anything, and so
    does a division by zero.

    Args:
        rule: the rule.
        execute: whether a rule that is proved is run by JAX, too.
    """
    if rule.obstacle:
        return RankVerdict(rule, "not expressible", rule.obstacle, RankProof("open"))
    if rule.fault:
        return RankVerdict(rule, "ill-typed", rule.fault, RankProof("ill-typed", rule.fault))
    proof = prove(rule)
    if proof.status == "ill-typed":
        return RankVerdict(rule, proof.status, proof.why, proof)
    try:
        runs = refute(rule)
    except RuleError as error:
        return RankVerdict(rule, "ill-typed", error.reason, proof)
    if runs.counterexample:
        rounding = "; real numbers have a proof, so the difference may be one of rounding" if proof.status == "proved" else ""
        return RankVerdict(rule, "refuted", runs.counterexample + rounding, proof)
    if not runs.substantial:
        why = "no instance with a dimension in every group has a defined element: the conditions may contradict each other"
        return RankVerdict(rule, "open", why, proof)
    if proof.status != "proved":
        return RankVerdict(rule, "open", f"{proof.why}; the sides are equal at {runs.number} instances", proof)
    if execute:
        for instance in instances(rule, 1, 3):
            if why := difference_by_jax(rule, instance):
                return RankVerdict(rule, "refuted", f"{instance}: {why}", proof)
    return RankVerdict(rule, "proved", f"for every rank and size; {proof.lemmas} lemmas about one dimension", proof)


def verdicts(
    rules: Iterable[RankRule], execute: bool = False, report: Callable[[str], None] = lambda text: None
) -> list[RankVerdict]:
    """Judge rules in turn."""
    results = []
    for number, rule in enumerate(rules):
        report(f"{number} rules: {rule.name}")
        results.append(verdict(rule, execute))
    return results
