"""Verification of a library, rule by rule: types, first-order proof, symbolic execution, and on request execution by JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from unity.pcg.types.axis import Axis
from unity.substitutions.language.rule import Rule
from unity.verify.proofs.bounded import BoundedCheck, executed
from unity.verify.proofs.execution import run
from unity.verify.proofs.first_order import Proof, Prover
from unity.verify.proofs.small_instances import small_instances, small_sizes


@dataclass(frozen=True)
class RuleVerdict:
    """The verdict on a rule, "proved", "refuted", "ill-typed" or "open", and the reason."""

    rule: Rule
    status: str
    why: str
    proof: Proof
    check: BoundedCheck


def verify(
    rules: Iterable[Rule], axioms: Sequence[Rule], execute: bool = False, report: Callable[[str], None] = lambda text: None
) -> list[RuleVerdict]:
    """Verify every rule from the axioms alone.

    A rule is proved only if every layer agrees: the first-order proof, the execution on symbols, and with `execute` that by JAX.
    """
    prover, results = Prover(axioms, cores=True), []
    for number, rule in enumerate(rules):
        report(f"{number} rules: {rule.name}")
        results.append(verified(rule, prover, execute))
    return results


def verified(rule: Rule, prover: Prover, execute: bool = False) -> RuleVerdict:
    """Verify one rule."""
    check = executed(rule)
    if check.status != "proved":
        return RuleVerdict(rule, check.status, check.why or str(check.counterexample), Proof("open"), check)
    proof = prover.prove(rule)
    if proof.status != "proved":
        why = f"equal at {check.instances} small instances, but it does not follow from the axioms"
        return RuleVerdict(rule, "open", why, proof, check)
    if execute and (problem := _problem_by_jax(rule)):
        return RuleVerdict(rule, "refuted", problem, proof, check)
    return RuleVerdict(rule, "proved", f"from {', '.join(proof.axioms)}", proof, check)


def _problem_by_jax(rule: Rule) -> str:
    """Run a rule by JAX at the largest of some instances. Return by how much the sides differ, or an empty text."""
    axes = tuple(Axis(name, 2, 0) for name in rule.of_kind("axis"))
    largest = small_instances(rule, axes, small_sizes(rule, 2), 8)[-1]
    deviation = run(largest.rule, largest.types, axes)
    if deviation.equal:
        return ""
    return f"run by JAX, values differ by {deviation.values:.1e}, gradients by {deviation.gradients:.1e}"
