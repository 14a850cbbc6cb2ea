"""Translation of FlexFlow's released rules into this rule language.

A tensor has three dimensions, replica, sample and channel, each with a degree. The rules are read as statements about the pieces
that each device holds:

- A dimension of degree k is distributed cyclically: device j has the indices that are j modulo k. (Cyclically rather than in
  blocks, because then each device can concatenate its own pieces of two partitioned tensors, as the rules assume.) Partition and
  Combine change a degree and nothing else.
- Replicate(d) copies every index of d next to itself and multiplies the degree: each of k devices has everything that one had.
- Reduce(d) adds k neighbours in d and divides the degree, if it is above one: the pieces of k devices are added. It needs
  *addends*: copies by a Replicate of d, or slices of the replica dimension, from devices or from a Concat. A Reduce of samples or
  channels that were not stacked adds slices of one tensor, not addends of a partial sum: the rule is ill-typed.
- Linear, `x · wᵀ`, reads one slice of the replica dimension. Where slices differ, the result depends on the choice: ill-typed.
  Partitioned channels lead to a partial sum in the result's replica dimension; a relu of that, fused or not, is ill-typed.
- Elementwise operators and Concat need operands of equal degrees, Split needs a Concat, Combine a degree, and the sides of a rule
  equal degrees: everything else is ill-typed. Only well-typed rules are proved or refuted.

So a tensor is represented by its *parts*, one term for every slice of the replica dimension and every copy in another one:
`Replicate(1)(x)` has the parts x and x. A rule is true if all parts of all its outputs are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from pathlib import Path

import numpy as np

from unity.substitutions.importing.flexflow_axes import InexpressibleRule, with_axes
from unity.substitutions.importing.flexflow_json import ACTIVATIONS, FlexFlowOperator, FlexFlowRule, read_rules
from unity.substitutions.importing.sizes import SizeProblem
from unity.substitutions.importing.verdict import Case, Imported, Judge, Refusal, Verdict
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, Term, Variable
from unity.substitutions.language.text import print_term

REPLICA, SAMPLE, CHANNEL = 0, 1, 2
DIMENSIONS = ("replica", "sample", "channel")
DEGREE, PARTS, SIZE = 16, 256, 16  # the largest degree, number of copies, and number of operators of a graph


@dataclass(frozen=True)
class TensorParts:
    """A tensor, represented by its parts.

    Attributes:
        parts: terms `[replicas, copies in samples, copies in channels]`.
        degrees: of the three dimensions.
        partial: whether the replicas are addends of one value.
        seams: where Split may cut each dimension, the last Concat last: after how many replicas; in samples and channels the
            parts have the seams, and the numbers are 0.
    """

    parts: np.ndarray
    degrees: tuple[int, ...] = (1, 1, 1)
    partial: bool = False
    seams: tuple[tuple[int, ...], ...] = ((), (), ())

    def times(self, dim: int, factor: int) -> tuple[int, ...]:
        """Return the degrees, one of them multiplied."""
        return (*self.degrees[:dim], self.degrees[dim] * factor, *self.degrees[dim + 1 :])

    def over(self, dim: int, factor: int) -> tuple[int, ...]:
        """Return the degrees, one of them divided."""
        return (*self.degrees[:dim], self.degrees[dim] // factor, *self.degrees[dim + 1 :])


def import_flexflow(path: str | Path) -> list[Imported]:
    """Return every rule of a released file, in its order, with the verdict. Raises RuleError for a file that cannot be read."""
    rules, judge = read_rules(Path(path).read_text(encoding="utf-8", errors="replace")), Judge()
    imported = judge.decide([_case(released) for released in rules])
    return [_with_axes(released, rule, judge) for released, rule in zip(rules, imported, strict=True)]


def _case(released: FlexFlowRule) -> Case | Imported:
    try:
        rule = translate(released)
    except Refusal as refusal:
        return Imported(released.name, None, Verdict(refusal.status, str(refusal)))
    return Case(rule, _problem(rule))


def _with_axes(released: FlexFlowRule, imported: Imported, judge: Judge) -> Imported:
    """Replace a proved equation of parts by a rule with axes, if there is one and it holds too."""
    if imported.verdict.status != "proved":
        return imported
    try:
        rule = with_axes(released)
    except InexpressibleRule:
        return imported
    return replace(imported, rule=rule) if judge.confirms(rule, _problem(rule)) else imported


def _problem(rule: Rule) -> SizeProblem:
    return SizeProblem(rule.sides, dict.fromkeys(rule.variables, 2))


def translate(released: FlexFlowRule) -> Rule:
    """Translate a released rule to equations of parts. Raises Refusal where it is ill-typed."""
    source, target = _results(released.source, "source"), _results(released.target, "target")
    left: list[Term] = []
    right: list[Term] = []
    for k, (source_output, target_output) in enumerate(released.outputs):
        x, y = _operand(source, source_output, f"output {k}"), _operand(target, target_output, f"output {k}")
        if x.degrees != y.degrees:
            raise Refusal("ill-typed", f"output {k}: the source's degrees are {_degrees(x)}, the target's {_degrees(y)}")
        if x.parts.shape != y.parts.shape:
            counts = (f"{h.parts.shape[REPLICA]} replicas" for h in (x, y))
            raise Refusal("ill-typed", f"output {k}: the source has {next(counts)} and the target {next(counts)}")
        if x.partial != y.partial:
            raise Refusal("ill-typed", f"output {k} is a partial sum on one side alone")
        left += x.parts.ravel().tolist()
        right += y.parts.ravel().tolist()
    return Rule(released.name, tuple(left), tuple(right))


def _results(operators: Sequence[FlexFlowOperator], side: str) -> list[tuple[TensorParts, ...]]:
    """Return the results of every operator of a graph."""
    if len(operators) > SIZE:
        raise Refusal("unsupported", f"the {side} graph has {len(operators)} operators, and at most {SIZE} are supported")
    results: list[tuple[TensorParts, ...]] = []
    for k, operator in enumerate(operators):
        where = f"{side} operator {k} ({operator.kind})"
        operands = [_operand(results, place, f"operand {i + 1} of {where}") for i, place in enumerate(operator.inputs)]
        if operator.kind not in OPERATORS:
            raise Refusal("unsupported", f"{where}: the rule language has no such operator")
        count, apply = OPERATORS[operator.kind]
        if len(operands) != count:
            raise Refusal("ill-typed", f"{where} takes {count} operands, and has {len(operands)}")
        results.append(apply(_Step(where, operator.parameters), *operands))
    return results


def _operand(results: Sequence[tuple[TensorParts, ...]], place: tuple[int, int], what: str) -> TensorParts:
    """Return a result of an operator, or an input variable."""
    operator, result = place
    if operator < 0:
        parts = np.empty((1, 1, 1), object)
        parts[0, 0, 0] = Variable(f"{'x' if operator > -4 else 'w'}{-operator}")
        return TensorParts(parts)
    if operator >= len(results):
        raise Refusal("ill-typed", f"{what} is operator {operator}, which does not come before it")
    if not 0 <= result < len(results[operator]):
        raise Refusal("ill-typed", f"{what} is result {result} of operator {operator}, which it does not have")
    return results[operator][result]


def _degrees(x: TensorParts) -> str:
    return "·".join(map(str, x.degrees))


@dataclass(frozen=True)
class _Step:
    """An operator of a rule: its place, for errors, and its parameters."""

    where: str
    parameters: Mapping[str, int] = field(default_factory=dict)

    def fail(self, why: str) -> Refusal:
        return Refusal("ill-typed", f"{self.where}: {why}")

    def number(self, name: str, default: int | None = None) -> int:
        value = self.parameters.get(name, default)
        if value is None:
            raise self.fail(f"there is no parameter {name}")
        return value

    def dim(self, name: str) -> int:
        dim = self.number(name)
        if not 0 <= dim <= CHANNEL:
            raise self.fail(f"{name} is {dim}, and a tensor has dimensions 0, 1 and 2")
        return dim

    def change(self) -> tuple[int, int]:
        """Return the dimension and the degree of a parallelization operator."""
        dim, degree = self.dim("PM_PARALLEL_DIM"), self.number("PM_PARALLEL_DEGREE")
        if degree < 2:
            raise self.fail(f"a degree of {degree} is less than 2")
        if degree > DEGREE:
            raise Refusal("unsupported", f"{self.where}: a degree of {degree}, and at most {DEGREE} is supported")
        return dim, degree


# Parallelization


def _partition(step: _Step, x: TensorParts) -> tuple[TensorParts, ...]:
    dim, k = step.change()
    return (replace(x, degrees=x.times(dim, k)),)


def _combine(step: _Step, x: TensorParts) -> tuple[TensorParts, ...]:
    dim, k = step.change()
    if x.degrees[dim] % k:
        raise step.fail(f"the operand's {DIMENSIONS[dim]} degree is {x.degrees[dim]}: there are no {k} pieces to combine")
    return (replace(x, degrees=x.over(dim, k)),)


def _replicate(step: _Step, x: TensorParts) -> tuple[TensorParts, ...]:
    dim, k = step.change()
    if x.parts.size * k > PARTS:
        raise Refusal("unsupported", f"{step.where}: more than {PARTS} copies")
    seams = _scaled(x.seams, dim, lambda at: at * k)
    return (replace(x, parts=np.repeat(x.parts, k, dim), degrees=x.times(dim, k), seams=seams),)


def _reduce(step: _Step, x: TensorParts) -> tuple[TensorParts, ...]:
    dim, k = step.change()
    count, degree = x.parts.shape[dim], x.degrees[dim]
    if count % k:
        raise step.fail(f"the operand is not a partial sum: {_without_addends(dim, count, degree)}")
    if degree > 1 and degree % k:
        raise step.fail(f"the operand's {DIMENSIONS[dim]} degree is {degree}, which {k} does not divide")
    groups = np.split(x.parts, count // k, dim)
    parts = np.concatenate([_add(np.split(g, k, dim)) for g in groups], dim)
    degrees = x.over(dim, k) if degree > 1 else x.degrees
    return (TensorParts(parts, degrees, x.partial and parts.shape[REPLICA] > 1, _scaled(x.seams, dim, lambda at: at // k)),)


def _without_addends(dim: int, count: int, degree: int) -> str:
    """Describe an operand that has no addends."""
    if dim == REPLICA:
        return f"it has {count} replica{'s' * (count > 1)}"
    return f"its {DIMENSIONS[dim]}s are {'slices' if degree > 1 else 'those'} of one tensor, not addends"


def _scaled(seams: tuple[tuple[int, ...], ...], dim: int, change: Callable[[int], int]) -> tuple[tuple[int, ...], ...]:
    """Change the seams of the replica dimension, which are counted in replicas."""
    return (tuple(map(change, seams[REPLICA])), *seams[1:]) if dim == REPLICA else seams


def _add(parts: Sequence[np.ndarray]) -> np.ndarray:
    return reduce(lambda x, y: _each("add", (), x, y), parts)


def _each(name: str, attributes: tuple[int | str, ...], *operands: np.ndarray, result: int = 0) -> np.ndarray:
    """Apply an operator of this language to every part."""
    parts = np.empty(operands[0].shape, object)
    for at in np.ndindex(*parts.shape):
        parts[at] = Apply(name, attributes, tuple(x.item(*at) for x in operands), result)
    return parts


# Computation


def _check_degrees(step: _Step, x: TensorParts, y: TensorParts) -> None:
    if x.degrees != y.degrees:
        raise step.fail(f"operand 1 has degrees {_degrees(x)}, operand 2 {_degrees(y)}")


def _elementwise(name: str) -> Callable[[_Step, TensorParts, TensorParts], tuple[TensorParts, ...]]:
    def run(step: _Step, x: TensorParts, y: TensorParts) -> tuple[TensorParts, ...]:
        _check_degrees(step, x, y)
        for dim, what in enumerate(DIMENSIONS):
            one, two = x.parts.shape[dim], y.parts.shape[dim]
            if one != two:
                raise step.fail(f"operand 1 has {one} parts in its {what} dimension, operand 2 {two}")
        if (x.partial or y.partial) and (name != "add" or not (x.partial and y.partial)):
            raise step.fail(f"{'operand 1' if x.partial else 'operand 2'} is a partial sum")
        return (replace(x, parts=_each(name, (), x.parts, y.parts)),)

    return run


def _function(name: str) -> Callable[[_Step, TensorParts], tuple[TensorParts, ...]]:
    def run(step: _Step, x: TensorParts) -> tuple[TensorParts, ...]:
        if x.partial:
            raise step.fail(f"the operand is a partial sum, which must be reduced before {name}")
        return (replace(x, parts=_each("map", (name,), x.parts)),)

    return run


def _concat(step: _Step, x: TensorParts, y: TensorParts) -> tuple[TensorParts, ...]:
    _check_degrees(step, x, y)
    if x.partial or y.partial:
        raise step.fail(f"{'operand 1' if x.partial else 'operand 2'} is a partial sum")
    dim = step.dim("PM_AXIS")
    counts = [[n for d, n in enumerate(h.parts.shape) if d != REPLICA or dim != REPLICA] for h in (x, y)]
    if counts[0] != counts[1]:
        raise step.fail("the operands are not copied alike")
    at = x.parts.shape[REPLICA] if dim == REPLICA else 0
    seams = tuple((*s, at) if d == dim else s for d, s in enumerate(x.seams))
    if dim == REPLICA:
        return (replace(x, parts=np.concatenate([x.parts, y.parts]), seams=seams),)
    return (replace(x, parts=_each("concat", (dim - 3,), x.parts, y.parts), seams=seams),)


def _split(step: _Step, x: TensorParts) -> tuple[TensorParts, ...]:
    dim = step.dim("PM_AXIS")
    if step.number("PM_NUM_OUTPUTS", 2) != 2:
        raise Refusal("unsupported", f"{step.where}: a Split undoes a Concat of two")
    if not x.seams[dim]:
        raise step.fail(f"the operand was not concatenated in its {DIMENSIONS[dim]} dimension: there is nothing to split")
    *rest, at = x.seams[dim]
    seams = tuple(tuple(rest) if d == dim else s for d, s in enumerate(x.seams))
    pieces = [x.parts[:at], x.parts[at:]] if dim == REPLICA else [_each("split", (dim - 3,), x.parts, result=r) for r in (0, 1)]
    return tuple(replace(x, parts=p, seams=seams) for p in pieces)


def _linear(step: _Step, x: TensorParts, w: TensorParts) -> tuple[TensorParts, ...]:
    """Multiply `x · wᵀ`: x [replica, n, c] by w [replica, out, in]."""
    for one, two, what in ((SAMPLE, REPLICA, "samples"), (REPLICA, SAMPLE, "outputs"), (CHANNEL, CHANNEL, "channels")):
        if x.degrees[one] != w.degrees[two]:
            pair = f"operand 1 has {DIMENSIONS[one]} degree {x.degrees[one]}, operand 2 {DIMENSIONS[two]} degree {w.degrees[two]}"
            raise step.fail(f"{pair}, and the {what} of both have the same axes")
    for k, h in enumerate((x, w)):
        differing = [p for p in h.parts[1:] if (p != h.parts[0]).any()]
        if differing:
            two = f"{print_term(h.parts[0].item(0))}; {print_term(differing[0].item(0))}"
            raise step.fail(f"operand {k + 1} has {len(h.parts)} replicas that differ [{two}], and a Linear reads one of them")
    products = _products(step, x.parts[0], w.parts[0], x.degrees[CHANNEL])
    result = TensorParts(
        products,
        (x.degrees[CHANNEL], x.degrees[SAMPLE], x.degrees[REPLICA]),
        len(products) > 1,
        ((), x.seams[SAMPLE], w.seams[SAMPLE]),
    )
    number = step.number("PM_ACTI", 0)
    if number not in ACTIVATIONS:
        raise Refusal("unsupported", f"{step.where}: no activation has number {number}")
    name = ACTIVATIONS[number]
    if name and result.partial:
        raise step.fail(f"the result is a partial sum, because the operands' channels are partitioned: {name} is fused too early")
    return (replace(result, parts=_each("map", (name,), result.parts)) if name else result,)


def _products(step: _Step, x: np.ndarray, w: np.ndarray, degree: int) -> np.ndarray:
    """Multiply parts of x [copies in samples, in channels] by parts of w, to `[addends, copies in samples, copies in outputs]`."""
    if x.shape[1] != w.shape[1]:
        raise step.fail(f"operand 1 has {x.shape[1]} copies in its channels, operand 2 {w.shape[1]}")
    x, w = (_sliced(step, parts, degree) for parts in (x, w))
    addends = max(degree, 1)
    products = np.empty((addends, x.shape[0], w.shape[0]), object)
    for j, s, o in product(*map(range, products.shape)):
        terms = [_product(x.item(s, c), w.item(o, c)) for c in range(j, x.shape[1], addends)]
        products[j, s, o] = reduce(lambda a, b: Apply("add", (), (a, b)), terms)
    return products


def _sliced(step: _Step, parts: np.ndarray, degree: int) -> np.ndarray:
    """Split parts of channels in halves, until there are as many as devices."""
    while parts.shape[1] < degree:
        parts = np.concatenate([parts[:, :, None], parts[:, :, None]], 2)
        parts = parts.reshape(len(parts), -1)
        for s, c in np.ndindex(*parts.shape):
            parts[s, c] = Apply("split", (-1,), (parts.item(s, c),), c % 2)
    if parts.shape[1] % degree:
        raise step.fail(f"{parts.shape[1]} parts cannot be distributed evenly over {degree} devices")
    return parts


def _product(x: Term, w: Term) -> Term:
    return Apply("matmul", (), (x, Apply("transpose", (), (w,))))


OPERATORS: dict[str, tuple[int, Callable[..., tuple[TensorParts, ...]]]] = {
    "OP_PARTITION": (1, _partition),
    "OP_COMBINE": (1, _combine),
    "OP_REPLICATE": (1, _replicate),
    "OP_REDUCE": (1, _reduce),
    "OP_LINEAR": (2, _linear),
    "OP_EW_ADD": (2, _elementwise("add")),
    "OP_EW_MUL": (2, _elementwise("mul")),
    "OP_RELU": (1, _function("relu")),
    "OP_SIGMOID": (1, _function("sigmoid")),
    "OP_TANH": (1, _function("tanh")),
    "OP_CONCAT": (2, _concat),
    "OP_SPLIT": (1, _split),
}
