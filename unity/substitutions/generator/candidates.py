"""From two equal graphs to a rule: confirmed at fresh shapes, its conditions found, its numbers made variables where it can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from unity.base.errors import IllTypedError
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Shape
from unity.substitutions.generator.enumeration import Equal
from unity.substitutions.generator.family import Family, Given
from unity.substitutions.language.rule import Condition, Different, Placed, Rule
from unity.substitutions.language.term import Apply, Attribute, Term, Variable, applications, transform, variables
from unity.substitutions.language.text import parse_rule
from unity.substitutions.language.typecheck import TensorType
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.proofs.first_order import Proof, Prover
from unity.verify.proofs.instances import agree, at_attributes, distinguishing_equalities, equal_at, placed, resized, satisfies
from unity.verify.proofs.small_instances import VALUES

LOOKED_AT = 8  # instances whose values are compared
NAMES = "xyzwuvst"
FUNCTIONS = ("relu", "tanh", "f")  # of which a variable must be any
LETTERS = {"dim": "de", "size": "kmn", "groups": "g", "padding": "p", "function": "f"}


@dataclass(frozen=True)
class Candidate:
    """A rule with the types of its variables in the enumeration that it comes from."""

    rule: Rule
    types: Mapping[str, TensorType]
    free: Mapping[str, tuple[int, ...]]
    axes: tuple[Axis, ...]


def candidate(found: Equal, family: Family) -> Candidate | None:
    """Two equal graphs as a rule, its variables named by appearance. None if a side lacks variables that the other needs."""
    left, right = set(variables(found.found)), set(variables(found.known))
    if not (left <= right or right <= left) or _constant(found):
        return None
    names = dict(zip(variables((*found.found, *found.known)), NAMES, strict=False))

    def rename(term: Term) -> Term:
        if isinstance(term, Variable):
            return Variable(names[term.name])
        return replace(term, attributes=("relu",)) if term.attributes == ("clip",) else term

    sides = transform((*found.found, *found.known), rename)
    leaves = [leaf for leaf in family.leaves for _ in range(leaf.count)]
    types = {new: leaves[int(old)].type for old, new in names.items()}
    free = {new: leaves[int(old)].free for old, new in names.items()}
    named = {value for t in applications(sides) for value in t.attributes}  # of axes that no operator names, nothing is said
    states = tuple(
        Placed(name, axis.name, t.states[k])
        for name, t in types.items()
        for k, axis in enumerate(family.axes)
        if t.states[k].kind != "U" and axis.name in named
    )
    rule = Rule("candidate", sides[: len(found.found)], sides[len(found.found) :], from_the_end(states, types))
    return Candidate(rule, types, free, family.axes)


def by_hand(given: Given) -> Candidate:
    """Two graphs that were given, as a rule."""
    rule = parse_rule(f"given {given.text}")
    leaves = dict(zip(rule.variables, given.leaves, strict=True))
    return Candidate(rule, {n: leaf.type for n, leaf in leaves.items()}, {n: leaf.free for n, leaf in leaves.items()}, ())


def _constant(found: Equal) -> bool:
    """Whether all there is to say is that two constants have one shape."""
    constants = {"ones", "identity", "identity_kernel", "mean_kernel"}
    inside = (x for t in applications((*found.found, *found.known)) if t.operator in constants for x in t.operands)
    return any(isinstance(x, Apply) for x in inside)


def from_the_end(placed: tuple[Placed, ...], types: Mapping[str, TensorType]) -> tuple[Condition, ...]:
    """Conditions with dimensions counted from the end, as rules count them."""
    return tuple(
        replace(c, state=c.state._replace(dim=c.state.dim - len(types[c.tensor].shape))) if c.state.kind == "P" else c
        for c in placed
    )


def confirmed(found: Candidate, rng: np.random.Generator) -> Rule | None:
    """The rule if it holds at other shapes and degrees, with the equalities of sizes that it needs. None if it was chance."""
    good: list[Mapping[str, TensorType]] = []
    bad: list[Mapping[str, TensorType]] = []
    for types in resized(found.types, found.free, (4, 8)):
        same = agree(found.rule, types, found.axes)
        if same is not None:
            # twice, because there are few indices to draw from
            equal = same and all(equal_at(found.rule, types, found.axes, rng) for _ in range(2))
            (good if equal else bad).append(types)
        if len(good) + len(bad) >= LOOKED_AT:
            break
    if not good or not _holds_at_three(found, rng):
        return None
    if not bad:
        return found.rule
    conditions = distinguishing_equalities(good, bad)
    return replace(found.rule, conditions=(*found.rule.conditions, *conditions)) if conditions else None


def _holds_at_three(found: Candidate, rng: np.random.Generator) -> bool:
    """Whether a parallel rule holds on axes of three devices, too. (Where it can be said there.)"""
    if not found.axes:
        return True
    axes = tuple(replace(a, size=3) for a in found.axes)
    types = next(resized(found.types, found.free, (4 * 3 ** len(axes),)))
    same = agree(found.rule, types, axes)
    return same is None or (same and equal_at(found.rule, types, axes, rng))


def generalizations(rule: Rule) -> Iterator[Rule]:
    """The rule with numbers and words replaced by variables, the most general first, the rule itself last."""
    places: dict[tuple[str, Attribute], None] = {}
    for term in applications(rule.sides):
        operator = VOCABULARY[term.operator]
        for position, (kind, value) in enumerate(zip(operator.attributes, term.attributes, strict=True)):
            if kind != "axis" and not operator.variable(position, value):
                places[kind, value] = None
    for size in range(len(places), -1, -1):
        for chosen in itertools.combinations(places, size):
            yield from _guarded(rule, chosen)


def _guarded(rule: Rule, chosen: tuple[tuple[str, Attribute], ...]) -> Iterator[Rule]:
    """One replacement, at first for all dimensions, then for all but the last, then for all but the last two."""
    letters = {kind: iter(names) for kind, names in LETTERS.items()}
    names = {place: next(letters[place[0]], "") for place in chosen}
    if not all(names.values()):
        return
    sides = transform(rule.sides, lambda t: _renamed(t, names))
    n = len(rule.left)
    dims = [name for (kind, _), name in names.items() if kind == "dim"]
    apart = [Different(a, b) for a, b in itertools.combinations(dims, 2)]
    conditions = tuple(
        replace(c, state=c.state._replace(dim=names.get(("dim", c.state.dim), c.state.dim)))
        if isinstance(c, Placed) and c.state.kind == "P"
        else c
        for c in rule.conditions
    )
    for excluded in ((), (-1,), (-1, -2)):
        guards = [Different(d, n) for d in dims for n in excluded]
        yield Rule(rule.name, sides[:n], sides[n:], (*conditions, *apart, *guards))
        if not dims:
            return


def _renamed(term: Term, names: Mapping[tuple[str, Attribute], str]) -> Term:
    if not isinstance(term, Apply):
        return term
    kinds = VOCABULARY[term.operator].attributes
    return replace(term, attributes=tuple(names.get((k, v), v) for k, v in zip(kinds, term.attributes, strict=True)))


def proved(found: Candidate, rule: Rule, prover: Prover, rng: np.random.Generator) -> tuple[Rule, Proof]:
    """The most general form of a rule that is proved and well-typed at every value of its variables, or the rule, open."""
    proof = Proof("open")
    for general in generalizations(rule):
        if everywhere(found, general, rng):
            proof = prover.prove(general)
            if proof.status == "proved":
                return general, proof
    return rule, proof


def everywhere(found: Candidate, rule: Rule, rng: np.random.Generator) -> bool:
    """Whether a rule holds at all values of its attribute variables for which both sides are well-typed; two of each, at least.

    At the shapes that it was found at, and at those of one more dimension.
    """
    free = {name: kind for name, kind in rule.attributes.items() if kind != "axis"}
    seen: dict[str, set[Attribute]] = {name: set() for name in free}
    for values in itertools.product(*(FUNCTIONS if kind == "function" else VALUES[kind] for kind in free.values())):
        chosen = dict(zip(free, values, strict=True))
        instance = at_attributes(rule, chosen)
        for shapes in (_shapes(found), _lifted(found)) if instance else ():
            assert instance is not None
            try:
                types = placed(instance.conditions, shapes, found.axes)
            except IllTypedError:
                continue
            same = agree(instance, types, found.axes)
            if same is None or not satisfies(instance, types):
                continue
            if not same or not equal_at(instance, types, found.axes, rng):
                return False
            for name, value in chosen.items():
                seen[name].add(value)
    return all(len(values) > 1 for values in seen.values())


Shapes = dict[str, tuple[Shape, str]]


def _shapes(found: Candidate) -> Shapes:
    return {name: (t.shape, t.dtype) for name, t in found.types.items()}


def _lifted(found: Candidate) -> Shapes:
    """The tensors of most dimensions with one more in front."""
    most = max(len(t.shape) for t in found.types.values())
    return {name: ((4, *shape) if len(shape) == most else shape, dtype) for name, (shape, dtype) in _shapes(found).items()}
