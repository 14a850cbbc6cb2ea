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
from unity.substitutions.language.rule import HasState, Rank, Rule
from unity.substitutions.language.term import Attribute, Term, Variable, applications, subterms
from unity.substitutions.language.typecheck import TensorType, result_types
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.proofs.instances import Types, at_attributes, placed, satisfies
from unity.verify.proofs.window_sizes import has_room, kernel_sides, least_side

VALUES: Mapping[str, tuple[Attribute, ...]] = {
    "dim": (-1, -2, -3, -4),
    "size": (1, 2, 3),
    "groups": (1, 2, 0),
    "padding": ("same", "valid"),
    "function": ("f",),
}
KERNEL = 3  # the side of kernels whose size a rule leaves open, if images have room for them
IMAGES = {"conv2d", "enlarge", "maxpool", "avgpool", "identity_kernel", "mean_kernel"}


@dataclass(frozen=True)
class SmallInstance:
    """A rule with values for its attribute variables, and types for its tensor variables."""

    rule: Rule
    attributes: Mapping[str, Attribute]
    types: Types

    @property
    def elements(self) -> int:
        """The number of elements of all variables together."""
        return sum(prod(t.shape) for t in self.types.values())


def small_sizes(rule: Rule, degree: int) -> tuple[int, ...]:
    """Return the sizes of dimensions at which a rule is checked. A split is also checked at unequal parts (1 and 3)."""
    operators = {t.operator for t in applications(rule.sides)}
    if rule.parallel:
        return (degree, 2 * degree)
    return (1, 2, 3) if "split" in operators else (1, 2)


def small_instances(rule: Rule, axes: tuple[Axis, ...], sizes: Sequence[int], limit: int) -> list[SmallInstance]:
    """Return at most `limit` instances of a rule, the smallest first.

    Choices of attributes take turns. A third of the instances have images with room for the rule's windows, if it has any
    (`unity.verify.proofs.window_sizes`). These begin with the first choice, the others with the last one, so that a small limit
    covers every choice.
    """
    rng = random.Random(0)
    free = {name: kind for name, kind in rule.attributes.items() if kind != "axis"}
    choices = [dict(zip(free, values, strict=True)) for values in itertools.product(*(VALUES[kind] for kind in free.values()))]
    rng.shuffle(choices)
    instances = [(instance, c) for c in choices if (instance := at_attributes(rule, c)) is not None]
    for ranks in _ranks(rule):
        large = [_round_robin([_of_attributes(r, c, axes, s, rng) for s in _with_room(r, ranks, sizes)]) for r, c in instances]
        small = [_of_attributes(r, c, axes, _small(r, ranks, sizes), rng) for r, c in reversed(instances)]
        chosen = list(itertools.islice(_round_robin(large), -(-limit // 3)))
        chosen += itertools.islice(_round_robin(small), limit - len(chosen))
        if chosen:
            return sorted(chosen, key=lambda i: i.elements)
    return []


def _round_robin(iterators: Iterable[Iterator[SmallInstance]]) -> Iterator[SmallInstance]:
    """Yield one instance of each iterator in turn, until all are exhausted."""
    active = list(iterators)
    while active:
        remaining = []
        for iterator in active:
            if (instance := next(iterator, None)) is not None:
                yield instance
                remaining.append(iterator)
        active = remaining


def _of_attributes(
    rule: Rule, chosen: Mapping[str, Attribute], axes: tuple[Axis, ...], shapes: Shapes, rng: random.Random
) -> Iterator[SmallInstance]:
    """Yield every instance with these attributes and well-typed sides; the types of the first variable take turns."""
    possible = _possible(rule, axes, shapes.every)
    for types in possible.values():
        rng.shuffle(types)
    first = next(iter(possible), None)
    alone = [possible] if first is None else [{**possible, first: [t]} for t in possible[first]]
    yield from _round_robin(_instances(rule, chosen, axes, some, shapes.room) for some in alone)


def _instances(
    rule: Rule, chosen: Mapping[str, Attribute], axes: tuple[Axis, ...], possible: Mapping[str, Sequence[TensorType]], room: bool
) -> Iterator[SmallInstance]:
    """Yield instances in order, typing each operator as soon as its operands have types.

    With `room`, only those in which every window has room.
    """
    order = list(subterms(rule.sides))
    assigned: dict[Term, TensorType] = {}

    def types_of(term: Term) -> Sequence[TensorType]:
        if isinstance(term, Variable):
            return possible[term.name]
        operands = tuple(assigned[x] for x in term.operands)
        try:
            types = result_types(term.operator, term.attributes, operands, axes)
        except IllTypedError:
            return ()
        return () if room and not has_room(term.operator, term.attributes, operands) else (types[term.result],)

    def extend(k: int) -> Iterator[SmallInstance]:
        if k == len(order):
            types = {t.name: assigned[t] for t in order if isinstance(t, Variable)}
            if all(assigned[a] == assigned[b] for a, b in zip(rule.left, rule.right, strict=True)) and satisfies(rule, types):
                yield SmallInstance(rule, chosen, types)
            return
        for type_ in types_of(order[k]):
            assigned[order[k]] = type_
            yield from extend(k + 1)

    return extend(0)


def _possible(rule: Rule, axes: tuple[Axis, ...], shapes: Sequence[Shape]) -> dict[str, list[TensorType]]:
    """Return the types that each variable may have, in the states that the rule's conditions require."""
    integers = index_variables(rule.sides)

    def typed(name: str, shape: Shape) -> Iterator[TensorType]:
        try:
            yield placed(rule.conditions, {name: (shape, "int32" if name in integers else "float32")}, axes)[name]
        except IllTypedError:
            return

    return {name: [t for shape in shapes for t in typed(name, shape)] for name in rule.variables}


def _ranks(rule: Rule) -> list[tuple[int, ...]]:
    """Return the usual ranks of variables, and, for a rule that has no instance of these, all ranks up to the highest it names."""
    usual = (4, 0) if _of_images(rule) else (2, 1, 3, 0)
    named = [-d for d in _numbers(rule, "dim")]
    named += [-c.state.dim for c in rule.conditions_of(HasState) if c.state.kind == "P" and isinstance(c.state.dim, int)]
    highest = max([*usual, *named, *(c.rank for c in rule.conditions_of(Rank))])
    return [usual, tuple(range(highest + 1))]


def _of_images(rule: Rule) -> bool:
    return any(t.operator in IMAGES for t in applications(rule.sides))


def _numbers(rule: Rule, kind: str) -> set[int]:
    """Return the numbers among the attributes of a kind, without the sizes of windows and kernels."""
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
    """Return shapes in which the last dimension, and both of a matrix, take all sizes, and others the two smallest.

    Dimensions that attributes divide also take their multiples, as channels those of groups.
    """
    fewest, every = (_with_multiples(s, sizes, _numbers(rule, "size")) for s in (sizes[:2], sizes))
    channels = _with_multiples(fewest, sizes, _numbers(rule, "groups"))
    dimensions = {r: [every if d == r - 1 or r == 2 else channels if r == 4 and d < 2 else fewest for d in range(r)] for r in ranks}
    return Shapes([s for r in ranks for s in itertools.product(*dimensions[r])])


def _with_room(rule: Rule, ranks: Sequence[int], sizes: Sequence[int]) -> list[Shapes]:
    """Return shapes of images with room for windows, each with kernels: one image size for every remainder by the longest stride.

    For a rule with axes one size, which the axes divide behind every window: at other sizes, its types decide. The list is empty
    where no window slides.
    """
    kernels = {1, KERNEL, *kernel_sides(rule.sides)}
    least, stride = least_side(rule.sides, max(kernels))
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
    """Return sizes, and the multiples of each divisor by the two smallest sizes."""
    return list(dict.fromkeys((*some, *(n * m for n in sorted(divisors) if n > 0 for m in sizes[:2]))))


def index_variables(terms: Sequence[Term]) -> set[str]:
    """Return the variables that are indices into a table."""
    return {name for t in applications(terms) if t.operator == "embedding" for name in _variables_of_indices(t.operands[1])}


def _variables_of_indices(term: Term) -> set[str]:
    """Return the variables that indices are computed from. The first operand of `within` and `behind` is a table."""
    if isinstance(term, Variable):
        return {term.name}
    parts = term.operands[1:] if term.operator in ("within", "behind") else term.operands
    return {name for x in parts for name in _variables_of_indices(x)}
