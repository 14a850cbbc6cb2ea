"""Small instances of a rule: attributes, ranks and sizes at which both sides are well-typed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from unity.base.errors import IllTypedError
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Shape
from unity.substitutions.language.rule import Placed, Rank, Rule
from unity.substitutions.language.term import Attribute, Term, Variable, applications, subterms
from unity.substitutions.language.typecheck import TensorType, result_types
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.proofs.instances import Types, at_attributes, placed, satisfies
from unity.verify.proofs.window_sizes import kernel_sides, roomy, side

VALUES: Mapping[str, tuple[Attribute, ...]] = {
    "dim": (-1, -2, -3, -4),
    "size": (1, 2, 3),
    "groups": (1, 2, 0),
    "padding": ("same", "valid"),
    "function": ("f",),
}
KERNEL = 3  # the side of kernels of which a rule says nothing, in images with room for them
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
    """All instances if there are no more than `limit`, else so many, for all attributes in turn. The small ones come first.

    A third has images with room for the rule's windows (`unity.verify.proofs.window_sizes`), if it has any: from the first choice
    on; the others from the last choice on, so that few are enough for each to be looked at."""
    rng = random.Random(0)
    free = {name: kind for name, kind in rule.attributes.items() if kind != "axis"}
    choices = [dict(zip(free, values, strict=True)) for values in itertools.product(*(VALUES[kind] for kind in free.values()))]
    rng.shuffle(choices)
    instances = [(instance, c) for c in choices if (instance := at_attributes(rule, c)) is not None]
    for ranks in _ranks(rule):
        large = [_in_turn([_of_attributes(r, c, axes, s, rng) for s in _with_room(r, ranks, sizes)]) for r, c in instances]
        small = [_of_attributes(r, c, axes, _small(r, ranks, sizes), rng) for r, c in reversed(instances)]
        found = list(itertools.islice(_in_turn(large), -(-limit // 3)))
        found += itertools.islice(_in_turn(small), limit - len(found))
        if chosen := sorted(found, key=lambda i: i.elements):
            return chosen
    return []


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
    rule: Rule, chosen: Mapping[str, Attribute], axes: tuple[Axis, ...], shapes: Shapes, rng: random.Random
) -> Iterator[Instance]:
    """Every assignment of types to the variables at which both sides are well-typed: each type of the first one in turn."""
    possible = _possible(rule, axes, shapes.every)
    for types in possible.values():
        rng.shuffle(types)
    first = next(iter(possible), None)
    alone = [possible] if first is None else [{**possible, first: [t]} for t in possible[first]]
    yield from _in_turn(_instances(rule, chosen, axes, some, shapes.room) for some in alone)


def _instances(
    rule: Rule, chosen: Mapping[str, Attribute], axes: tuple[Axis, ...], possible: Mapping[str, Sequence[TensorType]], room: bool
) -> Iterator[Instance]:
    """Yields instances in order, typing an operator as soon as its operands have types. `room`: whether windows need it."""
    order = list(subterms(rule.sides))
    found: dict[Term, TensorType] = {}

    def types_of(term: Term) -> Sequence[TensorType]:
        if isinstance(term, Variable):
            return possible[term.name]
        operands = tuple(found[x] for x in term.operands)
        try:
            types = result_types(term.operator, term.attributes, operands, axes)
        except IllTypedError:
            return ()
        return () if room and not roomy(term.operator, term.attributes, operands) else (types[term.result],)

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


def _possible(rule: Rule, axes: tuple[Axis, ...], shapes: Sequence[Shape]) -> dict[str, list[TensorType]]:
    """The types that each variable may have, in the states that the rule's conditions say."""
    integers = indices(rule.sides)

    def typed(name: str, shape: Shape) -> Iterator[TensorType]:
        try:
            yield placed(rule.conditions, {name: (shape, "int32" if name in integers else "float32")}, axes)[name]
        except IllTypedError:
            return

    return {name: [t for shape in shapes for t in typed(name, shape)] for name in rule.variables}


def _ranks(rule: Rule) -> list[tuple[int, ...]]:
    """The ranks of variables: the usual ones, and where nothing fits at these, all up to the highest that the rule speaks of."""
    usual = (4, 0) if _of_images(rule) else (2, 1, 3, 0)
    named = [-d for d in _numbers(rule, "dim")]
    named += [-c.state.dim for c in rule.where(Placed) if c.state.kind == "P" and isinstance(c.state.dim, int)]
    highest = max([*usual, *named, *(c.rank for c in rule.where(Rank))])
    return [usual, tuple(range(highest + 1))]


def _of_images(rule: Rule) -> bool:
    return any(t.operator in IMAGES for t in applications(rule.sides))


def _numbers(rule: Rule, kind: str) -> set[int]:
    """The numbers that attributes of a kind are, but for sizes of windows and of kernels."""
    places = (
        (v, k)
        for t in applications(rule.sides)
        for v, k in zip(t.attributes, VOCABULARY[t.operator].attributes, strict=True)
        if k != "size" or t.operator not in IMAGES
    )
    return {v for v, k in places if k == kind and isinstance(v, int)}


class Shapes(NamedTuple):
    """Shapes for the variables of a rule, and whether its windows must have room in them."""

    every: list[Shape]
    room: bool = False


def _small(rule: Rule, ranks: Sequence[int], sizes: Sequence[int]) -> Shapes:
    """The last dimension takes all sizes, and so does the one before it in a matrix; others take the two smallest.

    What attributes divide takes their multiples, too: channels those of groups.
    """
    few, every = (_with_multiples(s, sizes, _numbers(rule, "size")) for s in (sizes[:2], sizes))
    channels = _with_multiples(few, sizes, _numbers(rule, "groups"))
    of = {r: [every if d == r - 1 or r == 2 else channels if r == 4 and d < 2 else few for d in range(r)] for r in ranks}
    return Shapes([s for r in ranks for s in itertools.product(*of[r])])


def _with_room(rule: Rule, ranks: Sequence[int], sizes: Sequence[int]) -> list[Shapes]:
    """Images of one height and width, kernels for them, and what is left of them: of every remainder by the longest stride.

    Of a rule that speaks of axes, of one that these divide behind every window: it holds at others if its types do. None where
    nothing slides.
    """
    kernels = {1, KERNEL, *kernel_sides(rule.sides)}
    least, stride = side(rule.sides, max(kernels))
    if 4 not in ranks or least <= 2:
        return []
    step = sizes[0] * stride if rule.parallel else 1
    first = -(-least // step) * step
    images = [(first, first)] if rule.parallel else [(first, first + 1), *((first + k, first + k) for k in range(stride))]
    channels = _with_multiples(sizes[:2], sizes, _numbers(rule, "groups"))
    others = [s for s in _small(rule, ranks, sizes).every if len(s) != 4]
    spaces = [[image, *((n, n) for n in sorted({2, *kernels}))] for image in images]
    return [Shapes([*((n, c, *s) for n in channels for c in channels for s in space), *others], True) for space in spaces]


def _with_multiples(some: Sequence[int], sizes: Sequence[int], divisors: Iterable[int]) -> list[int]:
    """Sizes, and the two smallest of all times each divisor."""
    return list(dict.fromkeys((*some, *(n * m for n in sorted(divisors) if n > 0 for m in sizes[:2]))))


def indices(terms: Sequence[Term]) -> set[str]:
    """The variables that are looked up in a table."""
    return {name for t in applications(terms) if t.operator == "embedding" for name in _looked_up(t.operands[1])}


def _looked_up(term: Term) -> set[str]:
    """The variables that indices are made of; of `within` and `behind` the first operand is a table."""
    if isinstance(term, Variable):
        return {term.name}
    parts = term.operands[1:] if term.operator in ("within", "behind") else term.operands
    return {name for x in parts for name in _looked_up(x)}
