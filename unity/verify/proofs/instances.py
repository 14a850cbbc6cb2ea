"""Instances of a rule: values for its attributes, types for its variables, and whether it holds there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unity.base.errors import IllTypedError
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, Shape, misfit
from unity.substitutions.language.rule import Condition, Different, EqualSizes, HasState, Rank, Rule
from unity.substitutions.language.term import Attribute, Term, substitute
from unity.substitutions.language.typecheck import TensorType, typecheck
from unity.verify.semantics.domains import Array, ElementDomain, Modular
from unity.verify.semantics.meaning import evaluate, random_pieces
from unity.verify.semantics.pieces import join

Types = Mapping[str, TensorType]


def agree(rule: Rule, variables: Types, axes: tuple[Axis, ...]) -> bool | None:
    """Return whether both sides have the same types for these types of the variables. None where one side is ill-typed."""
    try:
        types = typecheck(rule.sides, variables, axes)
    except IllTypedError:
        return None
    return all(types[a] == types[b] for a, b in zip(rule.left, rule.right, strict=True))


def resized(variables: Types, free: Mapping[str, Sequence[int]], sizes: Sequence[int]) -> Iterator[dict[str, TensorType]]:
    """Yield the variables' types with every choice of sizes for their free dimensions, the most diverse choices first."""
    places = [(name, dim) for name in variables for dim in free[name]]
    choices = sorted(itertools.product(sizes, repeat=len(places)), key=lambda c: -len(set(c)))
    for chosen in choices:
        shapes = {name: list(t.shape) for name, t in variables.items()}
        for (name, dim), size in zip(places, chosen, strict=True):
            shapes[name][dim] = size
        yield {name: TensorType(tuple(shapes[name]), t.states, t.dtype) for name, t in variables.items()}


def equal_at(
    rule: Rule, variables: Types, axes: tuple[Axis, ...], rng: np.random.Generator, domain: ElementDomain | None = None
) -> bool:
    """Return whether both sides are equal for random elements of a field, where unequal sides hardly ever agree by chance."""
    domain = domain or Modular()
    types = typecheck(rule.sides, variables, axes)
    pieces = {name: random_pieces(t, axes, domain, rng) for name, t in variables.items()}
    values = evaluate(rule.sides, types, pieces, axes, domain)

    def whole(term: Term) -> Array:
        return join(values[term], types[term].shape, types[term].states, axes, domain)

    return all(np.array_equal(whole(a), whole(b)) for a, b in zip(rule.left, rule.right, strict=True))


def placed(
    conditions: Iterable[Condition], shapes: Mapping[str, tuple[Shape, str]], axes: tuple[Axis, ...]
) -> dict[str, TensorType]:
    """Return the types of variables: their shapes and dtypes, in the states that conditions require. Raises IllTypedError."""
    states = {name: [UNUSED] * len(axes) for name in shapes}
    at = {axis.name: k for k, axis in enumerate(axes)}
    for c in conditions:
        if not isinstance(c, HasState) or c.tensor not in shapes:
            continue
        state, rank = c.state, len(shapes[c.tensor][0])
        if state.kind == "P":
            if not -rank <= state.dim < rank:
                raise IllTypedError(f"{c.tensor} has rank {rank}, and no dimension {state.dim}")
            state = state._replace(dim=state.dim % rank)
        states[c.tensor][at[c.axis]] = state
    types = {name: TensorType(shape, tuple(states[name]), dtype) for name, (shape, dtype) in shapes.items()}
    for name, t in types.items():
        if why := misfit(t.shape, t.states, axes):
            raise IllTypedError(f"{name}: {why}")
    return types


def at_attributes(rule: Rule, values: Mapping[str, Attribute]) -> Rule | None:
    """Return the rule with values for its attribute variables. None where dimensions coincide that must differ."""
    for c in rule.conditions_of(Different):
        if values.get(c.left, c.left) == (values.get(c.right, c.right) if isinstance(c.right, str) else c.right):
            return None
    sides = substitute(rule.sides, {}, values)
    conditions = tuple(_with_dim(c, values) for c in rule.conditions if not isinstance(c, Different))
    n = len(rule.left)
    return Rule(rule.name, sides[:n], sides[n:], conditions)


def _with_dim(condition: Condition, values: Mapping[str, Attribute]) -> Condition:
    """Return a condition with a value for the dimension variable in it."""
    if not isinstance(condition, HasState) or condition.state.kind != "P":
        return condition
    dim: Any = condition.state.dim
    return replace(condition, state=condition.state._replace(dim=values.get(dim, dim)))


def satisfies(rule: Rule, variables: Types) -> bool:
    """Return whether the variables' ranks and sizes satisfy the rule's conditions."""
    if any(len(variables[c.tensor].shape) != c.rank for c in rule.conditions_of(Rank)):
        return False
    return all(variables[c.tensor].shape[c.dim] == variables[c.other].shape[c.other_dim] for c in rule.conditions_of(EqualSizes))


def distinguishing_equalities(positive: Sequence[Types], negative: Sequence[Types]) -> list[EqualSizes]:
    """Return one or two equalities of sizes that hold in all positive instances, and together in no negative one.

    Dimensions count from the end. The list is empty where there are none.
    """
    names = list(positive[0])
    places = [(n, d - len(positive[0][n].shape)) for n in names for d in range(len(positive[0][n].shape))]
    conditions = [EqualSizes(a, d, b, e) for (a, d), (b, e) in itertools.combinations(places, 2) if a != b]

    def holds(c: EqualSizes, types: Types) -> bool:
        return types[c.tensor].shape[c.dim] == types[c.other].shape[c.other_dim]

    common = [c for c in conditions if all(holds(c, types) for types in positive)]
    for count in (1, 2):
        for chosen in itertools.combinations(common, count):
            if not any(all(holds(c, types) for c in chosen) for types in negative):
                return list(chosen)
    return []
