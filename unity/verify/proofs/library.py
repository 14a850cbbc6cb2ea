"""A library verified again, rule by rule: types, proof, symbolic execution, and on request through JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from unity.pcg.types.axis import Axis
from unity.substitutions.language.rule import Rule
from unity.verify.proofs.bounded import Check, executed
from unity.verify.proofs.execution import run
from unity.verify.proofs.first_order import Proof, Prover
from unity.verify.proofs.small_instances import small_instances, small_sizes


@dataclass(frozen=True)
class Result:
    """What was found of a rule: "proved", "refuted", "ill-typed" or "open", and why."""

    rule: Rule
    status: str
    why: str
    proof: Proof
    check: Check


def verify(
    rules: Iterable[Rule], axioms: Sequence[Rule], execute: bool = False, report: Callable[[str], None] = lambda text: None
) -> list[Result]:
    """Every rule, from nothing but the axioms. A rule is proved only if every layer says so."""
    prover, results = Prover(axioms, cores=True), []
    for number, rule in enumerate(rules):
        report(f"{number} rules: {rule.name}")
        results.append(verified(rule, prover, execute))
    return results


def verified(rule: Rule, prover: Prover, execute: bool = False) -> Result:
    """One rule."""
    check = executed(rule)
    if check.status != "proved":
        return Result(rule, check.status, check.why or str(check.counterexample), Proof("open"), check)
    proof = prover.prove(rule)
    if proof.status != "proved":
        why = f"equal at {check.instances} small instances, but it does not follow from the axioms"
        return Result(rule, "open", why, proof, check)
    if execute and (problem := _executed_by_jax(rule)):
        return Result(rule, "refuted", problem, proof, check)
    return Result(rule, "proved", f"from {', '.join(proof.axioms)}", proof, check)


def _executed_by_jax(rule: Rule) -> str:
    """What went wrong at the largest of some instances. Empty if nothing."""
    axes = tuple(Axis(name, 2, 0) for name in rule.named("axis"))
    largest = small_instances(rule, axes, small_sizes(rule, 2), 8)[-1]
    apart = run(largest.rule, largest.types, axes)
    return "" if apart.equal else f"through JAX, values are {apart.values:.1e} apart, gradients {apart.gradients:.1e}"
