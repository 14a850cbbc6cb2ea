"""FlexFlow rules with axes for their degrees and states for their replica dimensions, as far as these can express them.

Every parallelization operator of the released rule gets a new axis; axes that operators and outputs bring together are then made
one. A replica dimension that is distributed over devices is a state along an axis, *replicated for use* or *partial sum*; one that
a device holds whole, from a Concat or a Combine, is a tensor for each slice. A Reduce of copies, which is no `reduce` here, is
written as a sum. Some tensors have no state, such as copies on one device along the sample dimension: then the rule stays an
equation of parts (`flexflow`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from unity.substitutions.importing.flexflow_json import ACTIVATIONS, FlexFlowOperator, FlexFlowRule
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, Term, Variable, substitute
from unity.substitutions.language.vocabulary import VOCABULARY

SLICES, COPIES, ADDENDS = "slices", "copies", "addends"
NAMES = "abcdefgh"


class InexpressibleRule(Exception):
    """Axes and states cannot express a rule. The message says why."""


@dataclass(frozen=True)
class PlacedSlices:
    """A tensor: its replica slices on a device, (axis, kind) for each dimension, and where a Split may cut the slices."""

    slices: tuple[Term, ...]
    axes: tuple[tuple[tuple[str, str], ...], ...] = ((), (), ())
    seams: tuple[int, ...] = ()

    def map_slices(self, change: Callable[[Term], Term]) -> PlacedSlices:
        return replace(self, slices=tuple(map(change, self.slices)))

    def with_axes(self, dim: int, axes: tuple[tuple[str, str], ...]) -> PlacedSlices:
        return replace(self, axes=tuple(axes if d == dim else old for d, old in enumerate(self.axes)))


class _Axes:
    """Axes by name, in classes of identified axes (union-find)."""

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
        """Identify the axes of two dimensions, in order. With `alike`, their kinds must be the same, too."""
        if len(one) != len(two) or (alike and [kind for _, kind in one] != [kind for _, kind in two]):
            raise InexpressibleRule("dimensions that are distributed differently are brought together")
        for (a, _), (b, _) in zip(one, two, strict=True):
            if self.root(a) != self.root(b):
                self.same[self.root(b)] = self.root(a)


def with_axes(released: FlexFlowRule) -> Rule:
    """Return a released rule with axes. Raises InexpressibleRule."""
    axes = _Axes()
    source, target = _results(released.source, axes), _results(released.target, axes)
    left: list[Term] = []
    right: list[Term] = []
    for source_output, target_output in released.outputs:
        x, y = _operand(source, source_output), _operand(target, target_output)
        for d in range(3):
            axes.join(x.axes[d], y.axes[d])
        if len(x.slices) != len(y.slices):
            raise InexpressibleRule("a device has more slices on one side")
        left += x.slices
        right += y.slices
    roots = list(dict.fromkeys(axes.root(f"axis{k + 1}") for k in range(axes.count)))
    if len(roots) > len(NAMES):
        raise InexpressibleRule("too many axes")
    names = {f"axis{k + 1}": NAMES[roots.index(axes.root(f"axis{k + 1}"))] for k in range(axes.count)}
    return Rule(released.name, substitute(left, {}, names), substitute(right, {}, names))


def _results(operators: Sequence[FlexFlowOperator], axes: _Axes) -> list[tuple[PlacedSlices, ...]]:
    """Return the results of every operator of a graph."""
    results: list[tuple[PlacedSlices, ...]] = []
    for operator in operators:
        results.append(_OPERATORS[operator.kind](operator, axes, *(_operand(results, place) for place in operator.inputs)))
    return results


def _operand(results: Sequence[tuple[PlacedSlices, ...]], place: tuple[int, int]) -> PlacedSlices:
    """Return a result of an operator, or an input variable."""
    operator, result = place
    if operator < 0:
        return PlacedSlices((Variable(f"{'x' if operator > -4 else 'w'}{-operator}"),))
    return results[operator][result]


def _apply(name: str, *attributes: int | str) -> Callable[..., Term]:
    return lambda *operands: Apply(name, attributes, operands)


def _dim(operator: FlexFlowOperator) -> int:
    if operator.parameters["PM_PARALLEL_DEGREE"] != 2:
        raise InexpressibleRule("a degree other than 2")
    return operator.parameters["PM_PARALLEL_DIM"]


def _partition(operator: FlexFlowOperator, axes: _Axes, x: PlacedSlices) -> tuple[PlacedSlices, ...]:
    d, axis = _dim(operator), axes.fresh()
    if d == 0:
        raise InexpressibleRule("a partitioned replica dimension")
    return (x.map_slices(_apply("partition", d - 3, axis)).with_axes(d, (*x.axes[d], (axis, SLICES))),)


def _replicate(operator: FlexFlowOperator, axes: _Axes, x: PlacedSlices) -> tuple[PlacedSlices, ...]:
    d, axis = _dim(operator), axes.fresh()
    inner = sum(kind != SLICES for _, kind in x.axes[d])  # copies are next to each other, inside of slices
    return (x.map_slices(_apply("replicate", axis)).with_axes(d, (*x.axes[d][:inner], (axis, COPIES), *x.axes[d][inner:])),)


def _combine(operator: FlexFlowOperator, axes: _Axes, x: PlacedSlices) -> tuple[PlacedSlices, ...]:
    d = _dim(operator)
    if not x.axes[d]:
        raise InexpressibleRule("a dimension that is not distributed is combined")
    *rest, (axis, kind) = x.axes[d]
    x = x.with_axes(d, tuple(rest))
    if kind == SLICES:
        return (x.map_slices(_apply("combine", d - 3, axis)),)
    if d or kind == ADDENDS:
        raise InexpressibleRule("copies or addends are combined")
    single = x.map_slices(lambda t: _single(t, axis))
    return (replace(single, slices=single.slices * 2),)


def _reduce(operator: FlexFlowOperator, axes: _Axes, x: PlacedSlices) -> tuple[PlacedSlices, ...]:
    d = _dim(operator)
    addends = [a for a in x.axes[d] if a[1] != SLICES]
    if addends:
        axis, kind = addends[-1]
        x = x.with_axes(d, tuple(a for a in x.axes[d] if a[0] != axis))
        if kind == ADDENDS:
            return (x.map_slices(_apply("reduce", axis)),)
        return (x.map_slices(lambda t: _twice(_single(t, axis))),)
    if d or x.axes[d]:
        raise InexpressibleRule("a sum of slices that are not addends")
    if len(x.slices) % 2:
        raise InexpressibleRule("a sum of slices that do not form pairs")
    pairs = zip(x.slices[::2], x.slices[1::2], strict=True)
    return (replace(x, slices=tuple(Apply("add", (), pair) for pair in pairs), seams=tuple(at // 2 for at in x.seams)),)


def _twice(x: Term) -> Term:
    return Apply("add", (), (x, x))


def _single(x: Term, axis: str) -> Term:
    """Return the term that was replicated along an axis."""
    if isinstance(x, Apply) and VOCABULARY[x.operator].parallel:
        return x.operands[0] if x.attributes[-1] == axis else replace(x, operands=(_single(x.operands[0], axis),))
    raise InexpressibleRule("copies that went through an operator")


def _linear(operator: FlexFlowOperator, axes: _Axes, x: PlacedSlices, w: PlacedSlices) -> tuple[PlacedSlices, ...]:
    axes.join(x.axes[1], w.axes[0], alike=False)
    axes.join(x.axes[0], w.axes[1], alike=False)
    axes.join(x.axes[2], w.axes[2])
    term: Term = Apply("matmul", (), (x.slices[0], Apply("transpose", (), (w.slices[0],))))
    function = ACTIVATIONS.get(operator.parameters.get("PM_ACTI", 0))
    addends = tuple((a, ADDENDS) for a, _ in x.axes[2])
    return (PlacedSlices((Apply("map", (function,), (term,)) if function else term,), (addends, x.axes[1], w.axes[1])),)


def _elementwise(name: str) -> Callable[..., tuple[PlacedSlices, ...]]:
    def run(operator: FlexFlowOperator, axes: _Axes, *xs: PlacedSlices) -> tuple[PlacedSlices, ...]:
        for d in range(3):
            for x, y in pairwise(xs):
                axes.join(x.axes[d], y.axes[d])
        attributes, applied = ((), name) if name in VOCABULARY else ((name,), "map")
        return (replace(xs[0], slices=tuple(Apply(applied, attributes, ts) for ts in zip(*(x.slices for x in xs), strict=True))),)

    return run


def _concat(operator: FlexFlowOperator, axes: _Axes, x: PlacedSlices, y: PlacedSlices) -> tuple[PlacedSlices, ...]:
    for d in range(3):
        axes.join(x.axes[d], y.axes[d])
    d = operator.parameters["PM_AXIS"]
    if d == 0:
        return (replace(x, slices=x.slices + y.slices, seams=(*x.seams, len(x.slices))),)
    return (replace(x, slices=tuple(map(_apply("concat", d - 3), x.slices, y.slices))),)


def _split(operator: FlexFlowOperator, axes: _Axes, x: PlacedSlices) -> tuple[PlacedSlices, ...]:
    d = operator.parameters["PM_AXIS"]
    if d:
        return tuple(x.map_slices(lambda t, r=r: Apply("split", (d - 3,), (t,), r)) for r in (0, 1))
    if not x.seams:
        raise InexpressibleRule("a replica dimension that was not concatenated is split")
    *seams, at = x.seams
    return tuple(replace(x, slices=part, seams=tuple(seams)) for part in (x.slices[:at], x.slices[at:]))


_OPERATORS: dict[str, Callable[..., tuple[PlacedSlices, ...]]] = {
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
