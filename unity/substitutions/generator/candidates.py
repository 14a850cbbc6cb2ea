"""Candidate rules from two equal graphs: confirmed at other shapes, given conditions, and generalized from numbers to variables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from unity.base.errors import IllTypedError
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Shape
from unity.substitutions.generator.enumeration import EqualGraphs
from unity.substitutions.generator.family import Family, WrittenPair
from unity.substitutions.language.rule import Condition, Different, HasState, Rule
from unity.substitutions.language.term import Apply, Attribute, Term, Variable, applications, transform, variables
from unity.substitutions.language.text import parse_rule
from unity.substitutions.language.typecheck import TensorType
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.proofs.first_order import Proof, Prover
from unity.verify.proofs.instances import agree, at_attributes, distinguishing_equalities, equal_at, placed, resized, satisfies
from unity.verify.proofs.small_instances import VALUES

INSTANCES = 8  # shapes at which the values of both sides are compared
NAMES = "xyzwuvst"
FUNCTIONS = ("relu", "tanh", "f")  # a variable must be able to be each of them
LETTERS = {"dim": "de", "size": "kmn", "groups": "g", "padding": "p", "function": "f"}


@dataclass(frozen=True)
class CandidateRule:
    """A rule with the types, and the free dimensions, of its variables in the enumeration."""

    rule: Rule
    types: Mapping[str, TensorType]
    free: Mapping[str, tuple[int, ...]]
    axes: tuple[Axis, ...]


def candidate(pair: EqualGraphs, family: Family) -> CandidateRule | None:
    """Return two equal graphs as a rule, variables named by appearance. None if each side has a variable that the other lacks."""
    left, right = set(variables(pair.new)), set(variables(pair.known))
    if not (left <= right or right <= left) or _is_about_constants(pair):
        return None
    names = dict(zip(variables((*pair.new, *pair.known)), NAMES, strict=False))

    def rename(term: Term) -> Term:
        if isinstance(term, Variable):
            return Variable(names[term.name])
        return replace(term, attributes=("relu",)) if term.attributes == ("clip",) else term

    sides = transform((*pair.new, *pair.known), rename)
    leaves = [leaf for leaf in family.leaves for _ in range(leaf.count)]
    types = {new: leaves[int(old)].type for old, new in names.items()}
    free = {new: leaves[int(old)].free for old, new in names.items()}
    named = {value for t in applications(sides) for value in t.attributes}  # only axes that an operator names have conditions
    states = tuple(
        HasState(name, axis.name, t.states[k])
        for name, t in types.items()
        for k, axis in enumerate(family.axes)
        if t.states[k].kind != "U" and axis.name in named
    )
    rule = Rule("candidate", sides[: len(pair.new)], sides[len(pair.new) :], _counted_from_end(states, types))
    return CandidateRule(rule, types, free, family.axes)


def written_candidate(pair: WrittenPair) -> CandidateRule:
    """Return two graphs written by hand as a rule."""
    rule = parse_rule(f"written {pair.text}")
    leaves = dict(zip(rule.variables, pair.leaves, strict=True))
    return CandidateRule(rule, {n: leaf.type for n, leaf in leaves.items()}, {n: leaf.free for n, leaf in leaves.items()}, ())


def _is_about_constants(pair: EqualGraphs) -> bool:
    """Return whether a constant has the shape of an operator's result: such a rule only says that two shapes are equal."""
    constants = {"ones", "identity", "identity_kernel", "mean_kernel"}
    inside = (x for t in applications((*pair.new, *pair.known)) if t.operator in constants for x in t.operands)
    return any(isinstance(x, Apply) for x in inside)


def _counted_from_end(placed: tuple[HasState, ...], types: Mapping[str, TensorType]) -> tuple[Condition, ...]:
    """Return conditions with dimensions counted from the end, as rules count them."""
    return tuple(
        replace(c, state=c.state._replace(dim=c.state.dim - len(types[c.tensor].shape))) if c.state.kind == "P" else c
        for c in placed
    )


def confirmed(pair: CandidateRule, rng: np.random.Generator) -> Rule | None:
    """Return the rule, with the equalities of sizes that it needs, if it holds at other shapes and degrees.

    None if its graphs were equal by chance.
    """
    positive: list[Mapping[str, TensorType]] = []
    negative: list[Mapping[str, TensorType]] = []
    for types in resized(pair.types, pair.free, (4, 8)):
        same_types = agree(pair.rule, types, pair.axes)
        if same_types is not None:
            # twice, because indices are drawn from few numbers
            equal = same_types and all(equal_at(pair.rule, types, pair.axes, rng) for _ in range(2))
            (positive if equal else negative).append(types)
        if len(positive) + len(negative) >= INSTANCES:
            break
    if not positive or not _holds_at_three(pair, rng):
        return None
    if not negative:
        return pair.rule
    conditions = distinguishing_equalities(positive, negative)
    return replace(pair.rule, conditions=(*pair.rule.conditions, *conditions)) if conditions else None


def _holds_at_three(pair: CandidateRule, rng: np.random.Generator) -> bool:
    """Return whether a parallel rule also holds on axes of three devices, if it is well-typed there."""
    if not pair.axes:
        return True
    axes = tuple(Axis(a.name, 3, a.level, a.reduce_in) for a in pair.axes)
    types = next(resized(pair.types, pair.free, (4 * 3 ** len(axes),)))
    same_types = agree(pair.rule, types, axes)
    return same_types is None or (same_types and equal_at(pair.rule, types, axes, rng))


def generalizations(rule: Rule) -> Iterator[Rule]:
    """Yield the rule with numbers and words replaced by variables, the most general first, the rule itself last."""
    places: dict[tuple[str, Attribute], None] = {}
    for term in applications(rule.sides):
        operator = VOCABULARY[term.operator]
        for position, (kind, value) in enumerate(zip(operator.attributes, term.attributes, strict=True)):
            if kind != "axis" and not operator.is_variable(position, value):
                places[kind, value] = None
    for size in range(len(places), -1, -1):
        for chosen in itertools.combinations(places, size):
            yield from _guarded(rule, chosen)


def _guarded(rule: Rule, chosen: tuple[tuple[str, Attribute], ...]) -> Iterator[Rule]:
    """Yield the rule with variables for the chosen numbers and words: for any dimension, any but the last, any but the last two."""
    letters = {kind: iter(names) for kind, names in LETTERS.items()}
    names = {place: next(letters[place[0]], "") for place in chosen}
    if not all(names.values()):
        return
    sides = transform(rule.sides, lambda t: _renamed(t, names))
    n = len(rule.left)
    dims = [name for (kind, _), name in names.items() if kind == "dim"]
    distinct = [Different(a, b) for a, b in itertools.combinations(dims, 2)]
    conditions = tuple(
        replace(c, state=c.state._replace(dim=names.get(("dim", c.state.dim), c.state.dim)))
        if isinstance(c, HasState) and c.state.kind == "P"
        else c
        for c in rule.conditions
    )
    for excluded in ((), (-1,), (-1, -2)):
        guards = [Different(d, n) for d in dims for n in excluded]
        yield Rule(rule.name, sides[:n], sides[n:], (*conditions, *distinct, *guards))
        if not dims:
            return


def _renamed(term: Term, names: Mapping[tuple[str, Attribute], str]) -> Term:
    if not isinstance(term, Apply):
        return term
    kinds = VOCABULARY[term.operator].attributes
    return replace(term, attributes=tuple(names.get((k, v), v) for k, v in zip(kinds, term.attributes, strict=True)))


def generalized(pair: CandidateRule, rule: Rule, prover: Prover, rng: np.random.Generator) -> tuple[Rule, Proof]:
    """Return the most general form of a rule that is proved and holds for all attributes, or else the rule with an open proof."""
    proof = Proof("open")
    for general in generalizations(rule):
        if _holds_for_all_attributes(pair, general, rng):
            proof = prover.prove(general)
            if proof.status == "proved":
                return general, proof
    return rule, proof


def _holds_for_all_attributes(pair: CandidateRule, rule: Rule, rng: np.random.Generator) -> bool:
    """Return whether a rule holds for all values of its attribute variables at which both sides are well-typed.

    There must be at least two values for each variable. The shapes are those of the candidate, with and without one more dimension.
    """
    free = {name: kind for name, kind in rule.attributes.items() if kind != "axis"}
    checked: dict[str, set[Attribute]] = {name: set() for name in free}
    for values in itertools.product(*(FUNCTIONS if kind == "function" else VALUES[kind] for kind in free.values())):
        chosen = dict(zip(free, values, strict=True))
        instance = at_attributes(rule, chosen)
        if instance is None:
            continue
        for shapes in (_shapes(pair), _lifted(pair)):
            try:
                types = placed(instance.conditions, shapes, pair.axes)
            except IllTypedError:
                continue
            same_types = agree(instance, types, pair.axes)
            if same_types is None or not satisfies(instance, types):
                continue
            if not same_types or not equal_at(instance, types, pair.axes, rng):
                return False
            for name, value in chosen.items():
                checked[name].add(value)
    return all(len(values) > 1 for values in checked.values())


Shapes = dict[str, tuple[Shape, str]]


def _shapes(pair: CandidateRule) -> Shapes:
    return {name: (t.shape, t.dtype) for name, t in pair.types.items()}


def _lifted(pair: CandidateRule) -> Shapes:
    """Return the shapes with one more dimension in front of those of the highest rank."""
    most = max(len(t.shape) for t in pair.types.values())
    return {name: ((4, *shape) if len(shape) == most else shape, dtype) for name, (shape, dtype) in _shapes(pair).items()}
