"""The shapes at which a rule can be looked at: every assignment of small sizes for which both sides are well-typed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unity.base.errors import IllTypedError
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, Shape, misfit
from unity.substitutions.language.rule import Condition, Different, EqualSizes, Placed, Rank, Rule
from unity.substitutions.language.term import Attribute, substitute
from unity.substitutions.language.typecheck import TensorType, typecheck
from unity.verify.semantics.domains import ElementDomain, Modular
from unity.verify.semantics.meaning import evaluate, random_pieces
from unity.verify.semantics.pieces import join

Types = Mapping[str, TensorType]


def agree(rule: Rule, known: Types, axes: tuple[Axis, ...]) -> bool | None:
    """Whether both sides have the same types for these types of the variables. None where one has none."""
    try:
        found = typecheck(rule.sides, known, axes)
    except IllTypedError:
        return None
    return all(found[a] == found[b] for a, b in zip(rule.left, rule.right, strict=True))


def resized(known: Types, free: Mapping[str, Sequence[int]], sizes: Sequence[int]) -> Iterator[dict[str, TensorType]]:
    """Every way to give the free dimensions of the variables these sizes; the most various first."""
    places = [(name, dim) for name in known for dim in free[name]]
    choices = sorted(itertools.product(sizes, repeat=len(places)), key=lambda c: -len(set(c)))
    for chosen in choices:
        shapes = {name: list(t.shape) for name, t in known.items()}
        for (name, dim), size in zip(places, chosen, strict=True):
            shapes[name][dim] = size
        yield {name: TensorType(tuple(shapes[name]), t.states, t.dtype) for name, t in known.items()}


def equal_at(
    rule: Rule, known: Types, axes: tuple[Axis, ...], rng: np.random.Generator, domain: ElementDomain | None = None
) -> bool:
    """Whether both sides have the same value for random elements: over a field, so that chance is out of it."""
    domain = domain or Modular()
    types = typecheck(rule.sides, known, axes)
    pieces = {name: random_pieces(t, axes, domain, rng) for name, t in known.items()}
    values = evaluate(rule.sides, types, pieces, axes, domain)

    def whole(term):
        return join(values[term], types[term].shape, types[term].states, axes, domain)

    return all(np.array_equal(whole(a), whole(b)) for a, b in zip(rule.left, rule.right, strict=True))


def placed(
    conditions: Iterable[Condition], shapes: Mapping[str, tuple[Shape, str]], axes: tuple[Axis, ...]
) -> dict[str, TensorType]:
    """The types of variables: these shapes and dtypes, in the states that conditions say. IllTypedError if that cannot be."""
    states = {name: [UNUSED] * len(axes) for name in shapes}
    at = {axis.name: k for k, axis in enumerate(axes)}
    for c in conditions:
        if not isinstance(c, Placed) or c.tensor not in shapes:
            continue
        state, rank = c.state, len(shapes[c.tensor][0])
        if state.kind == "P":
            if not -rank <= state.dim < rank:
                raise IllTypedError(f"{c.tensor} has rank {rank}, and no dimension {state.dim}")
            state = state._replace(dim=state.dim % rank)
        states[c.tensor][at[c.axis]] = state
    found = {name: TensorType(shape, tuple(states[name]), dtype) for name, (shape, dtype) in shapes.items()}
    for name, t in found.items():
        if why := misfit(t.shape, t.states, axes):
            raise IllTypedError(f"{name}: {why}")
    return found


def at_attributes(rule: Rule, values: Mapping[str, Attribute]) -> Rule | None:
    """The rule with its attribute variables replaced. None where dimensions coincide that must not."""
    for c in rule.where(Different):
        if values.get(c.left, c.left) == (values.get(c.right, c.right) if isinstance(c.right, str) else c.right):
            return None
    sides = substitute(rule.sides, {}, values)
    conditions = tuple(_with_dim(c, values) for c in rule.conditions if not isinstance(c, Different))
    n = len(rule.left)
    return Rule(rule.name, sides[:n], sides[n:], conditions)


def _with_dim(condition: Condition, values: Mapping[str, Attribute]) -> Condition:
    """A condition, the dimension variable in it replaced."""
    if not isinstance(condition, Placed) or condition.state.kind != "P":
        return condition
    dim: Any = condition.state.dim
    return replace(condition, state=condition.state._replace(dim=values.get(dim, dim)))


def satisfies(rule: Rule, known: Types) -> bool:
    """Whether the variables' ranks and sizes are as the rule's conditions say."""
    if any(len(known[c.tensor].shape) != c.rank for c in rule.where(Rank)):
        return False
    return all(known[c.tensor].shape[c.dim] == known[c.other].shape[c.other_dim] for c in rule.where(EqualSizes))


def equalities(found: Sequence[Types], but: Sequence[Types]) -> list[EqualSizes]:
    """The equalities of sizes that hold in all of some instances, and in none of the others. Dimensions count from the end."""
    names = list(found[0])
    places = [(n, d - len(found[0][n].shape)) for n in names for d in range(len(found[0][n].shape))]
    pairs = [(a, b) for a, b in itertools.combinations(places, 2) if a[0] != b[0]]

    def holds(pair, known: Types) -> bool:
        (a, d), (b, e) = pair
        return known[a].shape[d] == known[b].shape[e]

    kept = [p for p in pairs if all(holds(p, k) for k in found)]
    for size in (1, 2):
        for chosen in itertools.combinations(kept, size):
            if not any(all(holds(p, k) for p in chosen) for k in but):
                return [EqualSizes(a, d, b, e) for (a, d), (b, e) in chosen]
    return []
