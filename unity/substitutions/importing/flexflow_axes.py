"""A FlexFlow rule with its degrees as axes and its replica dimensions as states, where these can say it.

Every parallelization operator of the released rule gets an axis of its own; what operators and outputs bring together is then
one axis. A replica dimension that lies on devices is a state along an axis, *replicated for use* or *partial sum*; one that a
device holds whole (a Concat made it, or a Combine) is a tensor for each slice. Copies are of no use to `reduce` here, so that
a Reduce of them is written as the sum that it is. What is left over, such as copies on one device among the samples, has no
state: then the rule stays an equation of parts (`flexflow`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from unity.substitutions.importing.graphs import Node, Pair
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, Term, Variable, substitute
from unity.substitutions.language.vocabulary import VOCABULARY

SLICES, COPIES, ADDENDS = "slices", "copies", "addends"
NAMES = "abcdefgh"
FUNCTIONS = {1: "sigmoid", 2: "relu", 3: "tanh"}


class Unsayable(Exception):
    """A rule for which axes and states are not enough. The message says why."""


@dataclass(frozen=True)
class Placed:
    """A tensor: its replica slices on a device, where a Split may cut these, and for each dimension its axes and what they hold."""

    slices: tuple[Term, ...]
    axes: tuple[tuple[tuple[str, str], ...], ...] = ((), (), ())
    seams: tuple[int, ...] = ()

    def each(self, change: Callable[[Term], Term]) -> Placed:
        return replace(self, slices=tuple(map(change, self.slices)))

    def on(self, dim: int, axes: tuple[tuple[str, str], ...]) -> Placed:
        return replace(self, axes=tuple(axes if d == dim else old for d, old in enumerate(self.axes)))


class _Axes:
    """Names for axes, and which of them are one."""

    def __init__(self) -> None:
        self.same: dict[str, str] = {}
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return f"axis{self.count}"

    def root(self, name: str) -> str:
        while name in self.same:
            name = self.same[name]
        return name

    def join(self, one: Sequence[tuple[str, str]], two: Sequence[tuple[str, str]], alike: bool = True) -> None:
        """Makes the axes of two dimensions the same ones, in their order."""
        if len(one) != len(two) or (alike and [kind for _, kind in one] != [kind for _, kind in two]):
            raise Unsayable("dimensions that lie on devices in different ways are brought together")
        for (a, _), (b, _) in zip(one, two, strict=True):
            if self.root(a) != self.root(b):
                self.same[self.root(b)] = self.root(a)


def with_axes(pair: Pair) -> Rule:
    """A released rule with axes. Raises Unsayable."""
    axes = _Axes()
    source, target = _results(pair.source, axes), _results(pair.target, axes)
    left: list[Term] = []
    right: list[Term] = []
    for one, two in pair.outputs:
        x, y = _place(source, one), _place(target, two)
        for d in range(3):
            axes.join(x.axes[d], y.axes[d])
        if len(x.slices) != len(y.slices):
            raise Unsayable("a device holds more slices on one side")
        left += x.slices
        right += y.slices
    roots = list(dict.fromkeys(axes.root(f"axis{k + 1}") for k in range(axes.count)))
    if len(roots) > len(NAMES):
        raise Unsayable("too many axes")
    names = {f"axis{k + 1}": NAMES[roots.index(axes.root(f"axis{k + 1}"))] for k in range(axes.count)}
    return Rule(pair.name, substitute(left, {}, names), substitute(right, {}, names))


def _results(nodes: Sequence[Node], axes: _Axes) -> list[tuple[Placed, ...]]:
    found: list[tuple[Placed, ...]] = []
    for node in nodes:
        found.append(_OPERATORS[node.kind](node, axes, *(_place(found, place) for place in node.inputs)))
    return found


def _place(found: Sequence[tuple[Placed, ...]], place: tuple[int, int]) -> Placed:
    operator, result = place
    if operator < 0:
        return Placed((Variable(f"{'x' if operator > -4 else 'w'}{-operator}"),))
    return found[operator][result]


def _apply(name: str, *attributes: int | str) -> Callable[..., Term]:
    return lambda *operands: Apply(name, attributes, operands)


def _dim(node: Node) -> int:
    if node.parameters["PM_PARALLEL_DEGREE"] != 2:
        raise Unsayable("a degree other than 2")
    return node.parameters["PM_PARALLEL_DIM"]


def _partition(node: Node, axes: _Axes, x: Placed) -> tuple[Placed, ...]:
    d, axis = _dim(node), axes.fresh()
    if d == 0:
        raise Unsayable("a partitioned replica dimension")
    return (x.each(_apply("partition", d - 3, axis)).on(d, (*x.axes[d], (axis, SLICES))),)


def _replicate(node: Node, axes: _Axes, x: Placed) -> tuple[Placed, ...]:
    d, axis = _dim(node), axes.fresh()
    inner = sum(kind != SLICES for _, kind in x.axes[d])  # copies lie beside each other, inside of what slices there are
    return (x.each(_apply("replicate", axis)).on(d, (*x.axes[d][:inner], (axis, COPIES), *x.axes[d][inner:])),)


def _combine(node: Node, axes: _Axes, x: Placed) -> tuple[Placed, ...]:
    d = _dim(node)
    if not x.axes[d]:
        raise Unsayable("nothing lies on devices that could be combined")
    *rest, (axis, kind) = x.axes[d]
    x = x.on(d, tuple(rest))
    if kind == SLICES:
        return (x.each(_apply("combine", d - 3, axis)),)
    if d or kind == ADDENDS:
        raise Unsayable("copies or addends are combined")
    once = x.each(lambda t: _single(t, axis))
    return (replace(once, slices=once.slices * 2),)


def _reduce(node: Node, axes: _Axes, x: Placed) -> tuple[Placed, ...]:
    d = _dim(node)
    addends = [a for a in x.axes[d] if a[1] != SLICES]
    if addends:
        axis, kind = addends[-1]
        x = x.on(d, tuple(a for a in x.axes[d] if a[0] != axis))
        if kind == ADDENDS:
            return (x.each(_apply("reduce", axis)),)
        return (x.each(lambda t: _twice(_single(t, axis))),)
    if d or x.axes[d]:
        raise Unsayable("a sum of what is in no state along an axis")
    if len(x.slices) % 2:
        raise Unsayable("a sum of slices that are no pairs")
    pairs = zip(x.slices[::2], x.slices[1::2], strict=True)
    return (replace(x, slices=tuple(Apply("add", (), pair) for pair in pairs), seams=tuple(at // 2 for at in x.seams)),)


def _twice(x: Term) -> Term:
    return Apply("add", (), (x, x))


def _single(x: Term, axis: str) -> Term:
    """What was replicated along an axis."""
    if isinstance(x, Apply) and VOCABULARY[x.operator].parallel:
        return x.operands[0] if x.attributes[-1] == axis else replace(x, operands=(_single(x.operands[0], axis),))
    raise Unsayable("copies that went through an operator")


def _linear(node: Node, axes: _Axes, x: Placed, w: Placed) -> tuple[Placed, ...]:
    axes.join(x.axes[1], w.axes[0], alike=False)
    axes.join(x.axes[0], w.axes[1], alike=False)
    axes.join(x.axes[2], w.axes[2])
    term: Term = Apply("matmul", (), (x.slices[0], Apply("transpose", (), (w.slices[0],))))
    function = FUNCTIONS.get(node.parameters.get("PM_ACTI", 0))
    addends = tuple((a, ADDENDS) for a, _ in x.axes[2])
    return (Placed((Apply("map", (function,), (term,)) if function else term,), (addends, x.axes[1], w.axes[1])),)


def _elementwise(name: str) -> Callable[..., tuple[Placed, ...]]:
    def run(node: Node, axes: _Axes, *xs: Placed) -> tuple[Placed, ...]:
        for d in range(3):
            for x, y in pairwise(xs):
                axes.join(x.axes[d], y.axes[d])
        attributes, operator = ((), name) if name in VOCABULARY else ((name,), "map")
        return (replace(xs[0], slices=tuple(Apply(operator, attributes, ts) for ts in zip(*(x.slices for x in xs), strict=True))),)

    return run


def _concat(node: Node, axes: _Axes, x: Placed, y: Placed) -> tuple[Placed, ...]:
    for d in range(3):
        axes.join(x.axes[d], y.axes[d])
    d = node.parameters["PM_AXIS"]
    if d == 0:
        return (replace(x, slices=x.slices + y.slices, seams=(*x.seams, len(x.slices))),)
    return (replace(x, slices=tuple(map(_apply("concat", d - 3), x.slices, y.slices))),)


def _split(node: Node, axes: _Axes, x: Placed) -> tuple[Placed, ...]:
    d = node.parameters["PM_AXIS"]
    if d:
        return tuple(x.each(lambda t, r=r: Apply("split", (d - 3,), (t,), r)) for r in (0, 1))
    if not x.seams:
        raise Unsayable("a replica dimension that was not concatenated is split")
    *seams, at = x.seams
    return tuple(replace(x, slices=part, seams=tuple(seams)) for part in (x.slices[:at], x.slices[at:]))


_OPERATORS: dict[str, Callable[..., tuple[Placed, ...]]] = {
    "OP_PARTITION": _partition,
    "OP_COMBINE": _combine,
    "OP_REPLICATE": _replicate,
    "OP_REDUCE": _reduce,
    "OP_LINEAR": _linear,
    "OP_EW_ADD": _elementwise("add"),
    "OP_EW_MUL": _elementwise("mul"),
    "OP_RELU": _elementwise("relu"),
    "OP_SIGMOID": _elementwise("sigmoid"),
    "OP_TANH": _elementwise("tanh"),
    "OP_CONCAT": _concat,
    "OP_SPLIT": _split,
}
