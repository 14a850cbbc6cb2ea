"""Small instances of a rule: attributes, ranks and sizes at which both sides are well-typed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from unity.pcg.axis import Axis
from unity.pcg.errors import IllTypedError
from unity.pcg.state import Shape
from unity.substitutions.rule import Rule
from unity.substitutions.term import Attribute, Term, Variable, applications, subterms
from unity.substitutions.typecheck import TensorType, result_types
from unity.verify.instances import Types, at_attributes, placed, satisfies

VALUES: Mapping[str, tuple[Attribute, ...]] = {
    "dim": (-1, -2, -3, -4),
    "size": (1, 2, 3),
    "groups": (1, 2, 0),
    "padding": ("same", "valid"),
    "function": ("f",),
}
IMAGES = {"conv2d", "enlarge", "maxpool", "avgpool", "identity_kernel", "mean_kernel"}


@dataclass(frozen=True)
class Instance:
    """A rule without attribute variables, what these were, and types of the tensor variables."""

    rule: Rule
    attributes: Mapping[str, Attribute]
    types: Types

    @property
    def elements(self) -> int:
        """Of all variables together."""
        return sum(prod(t.shape) for t in self.types.values())


def small_sizes(rule: Rule, degree: int) -> tuple[int, ...]:
    """The sizes of dimensions at which a rule is looked at: where something is split, also parts that are no halves (1 and 3)."""
    operators = {t.operator for t in applications(rule.sides)}
    if rule.parallel:
        return (degree, 2 * degree)
    return (1, 2, 3) if "split" in operators else (1, 2)


def small_instances(rule: Rule, axes: tuple[Axis, ...], sizes: Sequence[int], limit: int) -> list[Instance]:
    """All instances if there are no more than `limit`, else so many, for all attributes in turn. The small ones come first."""
    rng = random.Random(0)
    free = {name: kind for name, kind in rule.attributes.items() if kind != "axis"}
    choices = [dict(zip(free, values, strict=True)) for values in itertools.product(*(VALUES[kind] for kind in free.values()))]
    rng.shuffle(choices)
    found = [_of_attributes(instance, c, axes, sizes, rng) for c in choices if (instance := at_attributes(rule, c)) is not None]
    return sorted(itertools.islice(_in_turn(found), limit), key=lambda i: i.elements)


def _in_turn(iterators: Iterable[Iterator[Instance]]) -> Iterator[Instance]:
    """One of each, then another one of each, and so on."""
    going = list(iterators)
    while going:
        left = []
        for iterator in going:
            if (found := next(iterator, None)) is not None:
                yield found
                left.append(iterator)
        going = left


def _of_attributes(
    rule: Rule, chosen: Mapping[str, Attribute], axes: tuple[Axis, ...], sizes: Sequence[int], rng: random.Random
) -> Iterator[Instance]:
    """Every assignment of types to the variables at which both sides are well-typed: each type of the first one in turn."""
    possible = _possible(rule, axes, sizes)
    for types in possible.values():
        rng.shuffle(types)
    first = next(iter(possible), None)
    alone = [possible] if first is None else [{**possible, first: [t]} for t in possible[first]]
    return _in_turn(_instances(rule, chosen, axes, some) for some in alone)


def _instances(
    rule: Rule, chosen: Mapping[str, Attribute], axes: tuple[Axis, ...], possible: Mapping[str, Sequence[TensorType]]
) -> Iterator[Instance]:
    """The same, in order: an operator is looked at as soon as its operands have types."""
    order = list(subterms(rule.sides))
    found: dict[Term, TensorType] = {}

    def types_of(term: Term) -> Sequence[TensorType]:
        if isinstance(term, Variable):
            return possible[term.name]
        try:
            return (result_types(term.operator, term.attributes, tuple(found[x] for x in term.operands), axes)[term.result],)
        except IllTypedError:
            return ()

    def extend(k: int) -> Iterator[Instance]:
        if k == len(order):
            types = {t.name: found[t] for t in order if isinstance(t, Variable)}
            if all(found[a] == found[b] for a, b in zip(rule.left, rule.right, strict=True)) and satisfies(rule, types):
                yield Instance(rule, chosen, types)
            return
        for type_ in types_of(order[k]):
            found[order[k]] = type_
            yield from extend(k + 1)

    return extend(0)


def _possible(rule: Rule, axes: tuple[Axis, ...], sizes: Sequence[int]) -> dict[str, list[TensorType]]:
    """The types that each variable may have: of every rank, in the states that the rule's conditions say."""
    integers = indices(rule.sides)
    ranks = (4, 0) if any(t.operator in IMAGES for t in applications(rule.sides)) else (2, 1, 3, 0)
    shapes = [shape for rank in ranks for shape in _shapes(rank, sizes)]

    def typed(name: str, shape: Shape) -> Iterator[TensorType]:
        try:
            yield placed(rule.conditions, {name: (shape, "int32" if name in integers else "float32")}, axes)[name]
        except IllTypedError:
            return

    return {name: [t for shape in shapes for t in typed(name, shape)] for name in rule.variables}


def _shapes(rank: int, sizes: Sequence[int]) -> Iterator[Shape]:
    """The last dimension takes all sizes, and so does the one before it in a matrix; others take the two smallest."""
    return itertools.product(*(sizes if d == rank - 1 or rank == 2 else sizes[:2] for d in range(rank)))


def indices(terms: Sequence[Term]) -> set[str]:
    """The variables that are looked up in a table."""
    return {name for t in applications(terms) if t.operator == "embedding" for name in _looked_up(t.operands[1])}


def _looked_up(term: Term) -> set[str]:
    """The variables that indices are made of; of `within` and `behind` the first operand is a table."""
    if isinstance(term, Variable):
        return {term.name}
    parts = term.operands[1:] if term.operator in ("within", "behind") else term.operands
    return {name for x in parts for name in _looked_up(x)}
