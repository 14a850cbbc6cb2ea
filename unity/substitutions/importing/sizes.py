"""Small shapes at which an imported rule is checked.

A released rule has no sizes. They are solved for: every dimension of a variable is an unknown, operators equate unknowns, and those
that stay free are enumerated. The equations are few and simple, and are solved thousands of times, so no solver is called. The type
checker confirms the result: a mistake here can lose an instance, but never prove a rule.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unity.substitutions.language.rule import EqualSizes
from unity.substitutions.language.term import Apply, Attribute, Term, Variable, subterms

Shapes = dict[str, tuple[int, ...]]
FREE = 9  # dimensions that are varied; others have the first size


class Unfit(Exception):
    """An operator cannot take some sizes. The message names the operator and the reason."""


@dataclass(frozen=True)
class Size:
    """A sum of a number and unknowns. A concatenated dimension has two `parts`, which a split undoes."""

    number: int
    unknowns: tuple[int, ...] = ()
    parts: tuple[Size, Size] | None = field(default=None, compare=False)

    def __add__(self, other: Size) -> Size:
        return Size(self.number + other.number, tuple(sorted(self.unknowns + other.unknowns)), (self, other))

    def at(self, values: Mapping[int, Size]) -> Size:
        """Replace the unknowns that have values by these."""
        if not any(u in values for u in self.unknowns):
            return self
        size = Size(self.number)
        for u in self.unknowns:
            size = size + (values[u].at(values) if u in values else Size(0, (u,)))
        return replace(size, parts=self.parts and (self.parts[0].at(values), self.parts[1].at(values)))

    def __str__(self) -> str:
        return str(self.number) if not self.unknowns else "?"


Shape = tuple[Size, ...]
Equate = Callable[[Size, Size, str], None]


@dataclass(frozen=True)
class Sizing:
    """Shapes for a rule's variables, and the groups of the convolutions whose attribute is a variable."""

    shapes: Shapes
    groups: dict[str, int]


@dataclass(frozen=True)
class SizeProblem:
    """The outputs of both sides, the variables' ranks, and the sizes that the released rule fixes, as (term, dimension, size)."""

    outputs: tuple[Term, ...]
    ranks: Mapping[str, int]
    fixed: tuple[tuple[Term, int, int], ...] = ()


def sizings(problem: SizeProblem, sizes: Sequence[int] = (1, 2, 3), various: bool = True) -> Iterator[Sizing]:
    """Yield all small sizings, the most diverse or the smallest first. Raises Unfit if there are none."""
    unknown, bound = _solve(problem)
    shapes = {name: tuple(s.at(bound) for s in shape) for name, shape in unknown.items()}
    free = sorted({u for shape in shapes.values() for s in shape for u in s.unknowns})
    choices = list(itertools.product(sizes, repeat=min(len(free), FREE)))
    random.Random(0).shuffle(choices)  # so that no dimension waits for all sizes of the others
    choices.sort(key=lambda c: -len(set(c)) if various else sum(c))
    refusal, any_fits = "", False
    for chosen in choices:
        values = dict(zip(free, map(Size, (*chosen, *itertools.repeat(sizes[0], len(free) - len(chosen)))), strict=True))
        try:
            sizing = fit(problem, {name: tuple(s.at(values).number for s in shape) for name, shape in shapes.items()})
        except Unfit as error:
            refusal = refusal or str(error)
        else:
            any_fits = True
            yield sizing
    if not any_fits:
        raise Unfit(f"no small sizes fit: {refusal}")


def fits(problem: SizeProblem, sizes: Sequence[int] = (1, 2, 3)) -> bool:
    """Return whether both sides are well-typed at some small sizes."""
    try:
        return next(sizings(problem, sizes), None) is not None
    except Unfit:
        return False


def fit(problem: SizeProblem, shapes: Shapes) -> Sizing:
    """Return shapes with the groups that follow from them. Raises Unfit where an operator cannot take them."""
    groups: dict[str, int] = {}
    _walk(problem, {name: tuple(map(Size, shape)) for name, shape in shapes.items()}, _same, groups)
    return Sizing(shapes, groups)


def equal_sizes(problem: SizeProblem) -> tuple[EqualSizes, ...]:
    """Return the equalities of variables' sizes that the operators imply. Dimensions count from the end."""
    unknown, bound = _solve(problem)
    places = [(name, d - len(shape), s.at(bound)) for name, shape in unknown.items() for d, s in enumerate(shape)]
    pairs = itertools.combinations(places, 2)
    return tuple(EqualSizes(a, d, b, e) for (a, d, x), (b, e, y) in pairs if a != b and d == e and x == y)


def _solve(problem: SizeProblem) -> tuple[dict[str, Shape], dict[int, Size]]:
    """Return the variables' shapes with an unknown for every dimension, and the values of unknowns that the operators imply."""
    count = itertools.count()
    shapes = {name: tuple(Size(0, (next(count),)) for _ in range(rank)) for name, rank in problem.ranks.items()}
    bound: dict[int, Size] = {}

    def equate(x: Size, y: Size, why: str) -> None:
        x, y = x.at(bound), y.at(bound)
        for one, other in ((x, y), (y, x)):
            if one.number == 0 and len(one.unknowns) == 1 and one.unknowns[0] not in other.unknowns:
                bound[one.unknowns[0]] = other
                return
        if not x.unknowns and not y.unknowns:
            _same(x, y, why)  # sums of several unknowns wait until they are numbers

    _walk(problem, shapes, equate, None)
    return shapes, bound


def _same(x: Size, y: Size, why: str) -> None:
    if x != y:
        raise Unfit(f"{why}: {x} and {y}")


def _walk(problem: SizeProblem, shapes: Mapping[str, Shape], equate: Equate, groups: dict[str, int] | None) -> None:
    """Compute the shape of every subterm, and equate sizes.

    `groups` collects the groups of convolutions. If it is None, sizes are unknowns, and constraints that need numbers are left out.
    """
    computed: dict[Term, Shape] = {}
    for term in subterms(problem.outputs):
        if isinstance(term, Variable):
            computed[term] = shapes[term.name]
        else:
            computed[term] = _result(term, [computed[x] for x in term.operands], equate, groups)
        if any(not s.unknowns and s.number < 1 for s in computed[term]):
            raise Unfit("an empty tensor")
    for term, dim, size in problem.fixed:
        if term in computed:  # some output needs it
            equate(computed[term][dim], Size(size), "a kernel's size")


LEAST_RANKS = {
    "matmul": 2,
    "transpose": 2,
    "concat": 1,
    "split": 1,
    "enlarge": 4,
    "identity": 2,
    "identity_kernel": 4,
    "mean_kernel": 4,
}


def _result(term: Apply, xs: list[Shape], equate: Equate, groups: dict[str, int] | None) -> Shape:
    """Return the shape of an operator's result."""
    name, attributes = term.operator, term.attributes
    if any(len(x) < LEAST_RANKS.get(name, 0) for x in xs):
        raise Unfit(f"{name} of a tensor of rank {min(map(len, xs))}")
    match name:
        case "add" | "sub" | "mul":
            _equate_all(xs[0], xs[1], equate, name)
            return tuple(a if a.parts else b for a, b in zip(xs[0], xs[1], strict=True))
        case "matmul":
            _ranks(name, xs, len(xs[0]))
            _equate_all(xs[0][:-2], xs[1][:-2], equate, name)
            equate(xs[0][-1], xs[1][-2], "matmul's inner dimensions")
            return (*xs[0][:-1], xs[1][-1])
        case "transpose":
            return (*xs[0][:-2], xs[0][-1], xs[0][-2])
        case "concat":
            return _concat(int(attributes[0]), xs, equate)
        case "split":
            return _split(int(attributes[0]), term.result, xs[0], groups is not None)
        case "conv2d":
            return _convolution(attributes, xs, equate, groups)
        case "maxpool" | "avgpool":
            _ranks(name, xs, 4)
            k, stride, padding = attributes
            return (*xs[0][:2], *(_window(s, Size(int(k)), int(stride), str(padding)) for s in xs[0][2:]))
        case "enlarge":
            k = int(attributes[0])
            if any(not s.unknowns and (s.number > k or (k - s.number) % 2) for s in xs[0][2:]):
                raise Unfit(f"enlarge to {k}")
            return (*xs[0][:2], Size(k), Size(k))
        case "identity":
            return (xs[0][-1], xs[0][-1])
        case "identity_kernel":
            return (xs[0][1], xs[0][1], Size(int(attributes[0])), Size(int(attributes[0])))
        case "mean_kernel":
            return (xs[0][1], Size(1), Size(int(attributes[0])), Size(int(attributes[0])))
        case _:  # elementwise in its first operand
            return xs[0]


def _ranks(name: str, xs: Sequence[Shape], rank: int) -> None:
    if any(len(x) != rank for x in xs):
        raise Unfit(f"{name} of tensors of ranks {' and '.join(str(len(x)) for x in xs)}")


def _equate_all(xs: Shape, ys: Shape, equate: Equate, why: str) -> None:
    if len(xs) != len(ys):
        raise Unfit(f"{why} of tensors of ranks {len(xs)} and {len(ys)}")
    for x, y in zip(xs, ys, strict=True):
        equate(x, y, why)


def _concat(d: int, xs: list[Shape], equate: Equate) -> Shape:
    _ranks("concat", xs, len(xs[0]))
    d %= len(xs[0])
    _equate_all((*xs[0][:d], *xs[0][d + 1 :]), (*xs[1][:d], *xs[1][d + 1 :]), equate, "concat's other dimensions")
    return (*xs[0][:d], xs[0][d] + xs[1][d], *xs[0][d + 1 :])


_derived = itertools.count(1 << 30)  # unknowns that depend on others, but not as sums


def _split(d: int, result: int, x: Shape, concrete: bool) -> Shape:
    d %= len(x)
    parts = x[d].parts
    if parts:
        part = parts[result]
    elif not concrete:
        part = Size(0, (next(_derived),))
    elif x[d].number % 2:
        raise Unfit("split of an odd size that was not concatenated")
    else:
        part = Size(x[d].number // 2)
    return (*x[:d], part, *x[d + 1 :])


def _window(size: Size, kernel: Size, stride: int, padding: str) -> Size:
    """Return the number of positions of a window that slides over a dimension."""
    if padding == "same" and stride == 1:
        return size
    if size.unknowns or kernel.unknowns:
        return Size(0, (next(_derived),))
    return Size(-(-size.number // stride) if padding == "same" else (size.number - kernel.number) // stride + 1)


def _convolution(
    attributes: tuple[Attribute, ...], xs: list[Shape], equate: Equate, groups: dict[str, int] | None
) -> Shape:  # fmt: skip
    _ranks("conv2d", xs, 4)
    (x, w), (g, stride, padding) = xs, attributes
    if g == 1:
        equate(x[1], w[1], "conv2d's channels and its kernel's inputs")
    elif g == 0:
        equate(w[1], Size(1), "a kernel of one group for each channel")
    elif groups is not None:
        count, rest = divmod(x[1].number, w[1].number)
        if rest or w[0].number % count or (isinstance(g, int) and g != count):
            raise Unfit(f"conv2d of {x[1]} channels with a kernel of {w[1]} inputs and {w[0]} outputs")
        if isinstance(g, str):
            groups[g] = count
    if g == 0 and groups is not None and w[0].number % x[1].number:
        raise Unfit("conv2d with one group for each channel")
    return (x[0], w[0], *(_window(s, k, int(stride), str(padding)) for s, k in zip(x[2:], w[2:], strict=True)))
