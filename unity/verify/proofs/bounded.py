"""Bounded checks: a rule is executed on symbols, at small shapes and attributes, on axes of two devices, and refuted if false.

A first-order proof trusts its axioms; this trusts only the operators' programs. Both sides run on all devices, on pieces of tensors
of symbols (the addends of partial sums are independent), and the whole tensors are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unity.pcg.types.axis import Axis
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Attribute
from unity.substitutions.language.text import print_term
from unity.substitutions.language.typecheck import shown, typecheck
from unity.verify.proofs.small_instances import SmallInstance, small_instances, small_sizes
from unity.verify.semantics.interpret import NotInterpreted
from unity.verify.semantics.meaning import evaluate, symbolic_tensor
from unity.verify.semantics.pieces import join, symbolic_pieces
from unity.verify.semantics.polynomial_equality import compare
from unity.verify.semantics.symbolic import PolynomialsTooLarge, Symbolic

DRAWS = (5, 2, 3)  # indices are drawn from -1 up to these: out of range of a small table on both sides


@dataclass(frozen=True)
class RuleCounterexample:
    """An instance in which two sides differ: the variables' types, the symbols' values, and both sides there (`why`).

    Without `decided`, the sides are neither proved equal nor shown to differ.
    """

    types: Mapping[str, str]
    attributes: Mapping[str, Attribute]
    why: str
    values: Mapping[str, float]
    decided: bool = True

    def __str__(self) -> str:
        instance = ", ".join(f"{n}: {t}" for n, t in [*self.attributes.items(), *self.types.items()])
        numbers = ", ".join(f"{n} = {v}" for n, v in self.values.items() if v)
        return f"{instance}: {self.why}" + (f", where {numbers} and all else is 0" if numbers else "")


@dataclass(frozen=True)
class BoundedCheck:
    """The outcome of a check.

    `status` is "proved" (at `instances` instances), "refuted", "open" (some instance was not decided) or "ill-typed" (there is no
    instance).
    """

    status: str
    instances: int = 0
    counterexample: RuleCounterexample | None = None
    why: str = ""


def executed(rule: Rule, sizes: Sequence[int] | None = None, limit: int = 24, degree: int = 2) -> BoundedCheck:
    """Execute a rule at small instances: all of them, or `limit`, spread over attributes, ranks and sizes."""
    axes = tuple(Axis(name, degree, 0) for name in rule.of_kind("axis"))
    return executed_at(small_instances(rule, axes, sizes or small_sizes(rule, degree), limit), axes)


def executed_at(instances: Iterable[SmallInstance], axes: tuple[Axis, ...]) -> BoundedCheck:
    """Execute a rule at some of its instances."""
    domain, count, undecided = Symbolic(), 0, None
    for number, instance in enumerate(instances):
        domain.renew()
        try:
            counterexample = _counterexample(instance, axes, domain, number)
        except (NotInterpreted, PolynomialsTooLarge):
            continue
        count += 1
        if counterexample is not None and counterexample.decided:
            return BoundedCheck("refuted", count, counterexample)
        undecided = undecided or counterexample
    if undecided is not None:
        return BoundedCheck("open", count, undecided)
    return BoundedCheck("proved", count) if count else BoundedCheck("ill-typed", why="no small instance has both sides well-typed")


def _counterexample(instance: SmallInstance, axes: tuple[Axis, ...], domain: Symbolic, number: int) -> RuleCounterexample | None:
    """Return values for which the sides of an instance differ, or None. Floats are symbols; indices are drawn a few times."""
    concrete = any(not t.dtype.startswith("float") for t in instance.types.values())
    draws = (_compare_sides(instance, axes, domain, below, number) for below in (DRAWS if concrete else DRAWS[:1]))
    differing = [c for c in draws if c is not None]
    return next((c for c in differing if c.decided), differing[0] if differing else None)


def _compare_sides(
    instance: SmallInstance, axes: tuple[Axis, ...], domain: Symbolic, below: int, number: int
) -> RuleCounterexample | None:  # fmt: skip
    rule = instance.rule
    types = typecheck(rule.sides, instance.types, axes)
    rng = np.random.default_rng((number, below))
    wholes = {name: symbolic_tensor(name, t, domain, rng, -1, below) for name, t in instance.types.items()}
    pieces = {name: symbolic_pieces(wholes[name], t.states, axes, domain, name, rng) for name, t in instance.types.items()}
    values = evaluate(rule.sides, types, pieces, axes, domain)
    for left, right in zip(rule.left, rule.right, strict=True):
        a, b = (join(values[t], types[t].shape, types[t].states, axes, domain) for t in (left, right))
        result = compare(domain, a, b)
        if result.answer == "equal":
            continue
        variables = {name: shown(t, axes) for name, t in instance.types.items()}
        if result.answer == "unknown":
            why = f"at {list(result.at)} neither equal nor told apart"
            return RuleCounterexample(variables, instance.attributes, why, {}, decided=False)
        why = f"{print_term(left)} is {result.left:g} at {list(result.at)}, and {print_term(right)} is {result.right:g}"
        indices = {
            f"{name}{list(at)}".replace(" ", ""): float(whole.array[at])
            for name, whole in wholes.items()
            if whole.known
            for at in np.ndindex(*whole.array.shape)
        }
        numbers = {n: float(v) for n, v in (result.values or {}).items()}
        return RuleCounterexample(variables, instance.attributes, why, indices | numbers)
    return None
