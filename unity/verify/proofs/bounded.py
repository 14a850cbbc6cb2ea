"""Bounded checks: a rule executed on symbols, at small shapes and attributes, on axes of two devices. What is false is refuted.

A first-order proof believes its axioms; this believes nothing but the operators' own programs. Both sides run on all devices, on
pieces made of symbols (a partial sum's parts are free), and the tensors that the pieces stand for are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unity.pcg.types.axis import Axis
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Attribute
from unity.substitutions.language.text import print_term
from unity.substitutions.language.typecheck import TensorType, shown, typecheck
from unity.verify.proofs.small_instances import Instance, small_instances, small_sizes
from unity.verify.semantics.interpret import NotInterpreted
from unity.verify.semantics.meaning import evaluate
from unity.verify.semantics.pieces import join, symbolic_pieces
from unity.verify.semantics.polynomial_equality import compare
from unity.verify.semantics.primitives.core import StackedValue
from unity.verify.semantics.symbolic import PolynomialsTooLarge, Symbolic

DRAWS = (5, 2, 3)  # indices are drawn from -1 up to these: out of range of a small table on both sides


@dataclass(frozen=True)
class Counterexample:
    """Where two sides differ: the variables' types, the symbols' values, and what both sides are there."""

    types: Mapping[str, str]
    attributes: Mapping[str, Attribute]
    why: str
    values: Mapping[str, float]
    decided: bool = True

    def __str__(self) -> str:
        given = ", ".join(f"{n}: {t}" for n, t in [*self.attributes.items(), *self.types.items()])
        numbers = ", ".join(f"{n} = {v}" for n, v in self.values.items() if v)
        return f"{given}: {self.why}" + (f", where {numbers} and all else is 0" if numbers else "")


@dataclass(frozen=True)
class Check:
    """ "proved" at so many instances; "refuted"; "open", where some instance was not decided; "ill-typed", where there is none."""

    status: str
    instances: int = 0
    counterexample: Counterexample | None = None
    why: str = ""


def executed(rule: Rule, sizes: Sequence[int] | None = None, limit: int = 24, degree: int = 2) -> Check:
    """A rule at small instances: all there are, or `limit` of them, spread over attributes, ranks and sizes."""
    axes = tuple(Axis(name, degree, 0) for name in rule.named("axis"))
    domain, count, undecided = Symbolic(), 0, None
    for number, instance in enumerate(small_instances(rule, axes, sizes or small_sizes(rule, degree), limit)):
        domain.renew()
        try:
            found = _compared(instance, axes, domain, number)
        except (NotInterpreted, PolynomialsTooLarge):
            continue
        count += 1
        if found is not None and found.decided:
            return Check("refuted", count, found)
        undecided = undecided or found
    if undecided is not None:
        return Check("open", count, undecided)
    return Check("proved", count) if count else Check("ill-typed", why="no small instance has both sides well-typed")


def _compared(instance: Instance, axes: tuple[Axis, ...], domain: Symbolic, number: int) -> Counterexample | None:
    """Where the sides of an instance differ. Symbols stand for all floating values; of indices there are a few draws."""
    concrete = any(not t.dtype.startswith("float") for t in instance.types.values())
    found = (_compare(instance, axes, domain, below, number) for below in (DRAWS if concrete else DRAWS[:1]))
    differing = [f for f in found if f is not None]
    return next((f for f in differing if f.decided), differing[0] if differing else None)


def _compare(instance: Instance, axes: tuple[Axis, ...], domain: Symbolic, below: int, number: int) -> Counterexample | None:
    rule, known = instance.rule, instance.types
    types = typecheck(rule.sides, known, axes)
    rng = np.random.default_rng((number, below))
    wholes = {name: _whole(name, t, domain, below, rng) for name, t in known.items()}
    held = {name: symbolic_pieces(wholes[name], t.states, axes, domain, name, rng) for name, t in known.items()}
    values = evaluate(rule.sides, types, held, axes, domain)
    for left, right in zip(rule.left, rule.right, strict=True):
        a, b = (join(values[t], types[t].shape, types[t].states, axes, domain) for t in (left, right))
        found = compare(domain, a, b)
        if found.answer == "equal":
            continue
        said = {name: shown(t, axes) for name, t in known.items()}
        if found.answer == "unknown":
            why = f"at {list(found.at)} neither equal nor told apart"
            return Counterexample(said, instance.attributes, why, {}, decided=False)
        why = f"{print_term(left)} is {found.left:g} at {list(found.at)}, and {print_term(right)} is {found.right:g}"
        indices = {
            f"{name}{list(at)}".replace(" ", ""): float(whole.array[at])
            for name, whole in wholes.items()
            if whole.known
            for at in np.ndindex(*whole.array.shape)
        }
        return Counterexample(said, instance.attributes, why, indices | {n: float(v) for n, v in (found.values or {}).items()})
    return None


def _whole(name: str, type_: TensorType, domain: Symbolic, below: int, rng: np.random.Generator) -> StackedValue:
    """A tensor of symbols, or of random indices."""
    if type_.dtype.startswith("float"):
        return StackedValue(domain.symbols(name, type_.shape), False)
    return StackedValue(rng.integers(-1, below, type_.shape), True)
