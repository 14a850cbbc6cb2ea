"""FlexFlow's released rules in this rule language.

A tensor has three dimensions, replica, sample and channel, and each has a degree. The rules are read by what each device holds:

- A dimension of degree k lies on k devices in turns: device j holds the indices that leave j when divided by k. (In turns, and
  not in blocks, because then a concat of two partitioned tensors is what each device does with its own pieces, as the rules
  take it to be.) Partition and Combine change a degree and nothing else.
- Replicate(d) copies every index of d beside itself and multiplies the degree: each of k devices holds all that one held.
- Reduce(d) adds k neighbours in d and divides the degree, where there is one: what k devices hold is added. It needs
  *addends*: copies that a Replicate of d made, or slices of the replica dimension, whether devices or a Concat put them there.
  A Reduce of samples or channels that nobody stacked adds slices of one tensor: no partial sum, and the rule is ill-typed.
- Linear, `x · wᵀ`, reads one slice of the replica dimension. Where slices differ it depends on which: ill-typed. Channels that
  are partitioned make a partial sum in the result's replica dimension; a relu over that, fused or not, is ill-typed.
- Elementwise operators and Concat need operands of equal degrees, Split needs a Concat, Combine a degree, and the sides of a
  rule equal degrees: everything else is ill-typed. Only what has passed all that is proved or refuted.

What stands for a tensor here are therefore its *parts*, one term for every slice of a replica dimension and every copy in
another one: `Replicate(1)(x)` are the parts x and x. A rule is true when all parts of all its outputs are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from pathlib import Path

import numpy as np

from unity.substitutions.importing.axes import Unsayable, with_axes
from unity.substitutions.importing.graphs import Node, Pair, read_graphs
from unity.substitutions.importing.sizes import Problem
from unity.substitutions.importing.verdict import Case, Court, Imported, Refusal, Verdict
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, Term, Variable
from unity.substitutions.language.text import print_term

REPLICA, SAMPLE, CHANNEL = 0, 1, 2
DIMENSIONS = ("replica", "sample", "channel")
DEGREE, PARTS, SIZE = 16, 256, 16  # what is looked at: degrees, copies, operators of a graph
ACTIVATIONS = {0: None, 1: "sigmoid", 2: "relu", 3: "tanh"}


@dataclass(frozen=True)
class Held:
    """A tensor: its parts `[replicas, copies in samples, copies in channels]`, and the degrees of its dimensions.

    `partial` says that the replicas are addends of one value; `seams` where Split may cut, for each dimension, last Concat last:
    after how many replicas, or (in samples and channels) wherever the parts themselves were put together.
    """

    parts: np.ndarray
    degrees: tuple[int, ...] = (1, 1, 1)
    partial: bool = False
    seams: tuple[tuple[int, ...], ...] = ((), (), ())

    def times(self, dim: int, factor: int) -> tuple[int, ...]:
        """The degrees with one multiplied."""
        return (*self.degrees[:dim], self.degrees[dim] * factor, *self.degrees[dim + 1 :])

    def over(self, dim: int, factor: int) -> tuple[int, ...]:
        """The degrees with one divided."""
        return (*self.degrees[:dim], self.degrees[dim] // factor, *self.degrees[dim + 1 :])


def import_flexflow(path: str | Path) -> list[Imported]:
    """Every rule of a released file, in its order, with the verdict. Raises RuleError for a file that cannot be read."""
    released, court = read_graphs(Path(path).read_text(encoding="utf-8", errors="replace")), Court()
    found = court.judge([_case(pair) for pair in released])
    return [_with_axes(pair, x, court) for pair, x in zip(released, found, strict=True)]


def _case(pair: Pair) -> Case | Imported:
    try:
        rule = translate(pair)
    except Refusal as refusal:
        return Imported(pair.name, None, Verdict(refusal.status, str(refusal)))
    return Case(rule, _problem(rule))


def _with_axes(pair: Pair, found: Imported, court: Court) -> Imported:
    """A rule whose parts are proved equal is kept with axes, where there is such a rule and it holds too."""
    if found.verdict.status != "proved":
        return found
    try:
        rule = with_axes(pair)
    except Unsayable:
        return found
    return replace(found, rule=rule) if court.confirms(rule, _problem(rule)) else found


def _problem(rule: Rule) -> Problem:
    return Problem(rule.sides, dict.fromkeys(rule.variables, 2))


def translate(pair: Pair) -> Rule:
    """A released rule as equations of parts. Raises Refusal where it is ill-typed."""
    source, target = _results(pair.source, "source"), _results(pair.target, "target")
    left: list[Term] = []
    right: list[Term] = []
    for k, (one, two) in enumerate(pair.outputs):
        x, y = _place(source, one, f"output {k}"), _place(target, two, f"output {k}")
        if x.degrees != y.degrees:
            raise Refusal("ill-typed", f"output {k}: the source's degrees are {_degrees(x)}, the target's {_degrees(y)}")
        if x.parts.shape != y.parts.shape:
            counts = (f"{h.parts.shape[REPLICA]} replicas" for h in (x, y))
            raise Refusal("ill-typed", f"output {k}: the source has {next(counts)} and the target {next(counts)}")
        if x.partial != y.partial:
            raise Refusal("ill-typed", f"output {k} is a partial sum on one side and none on the other")
        left += x.parts.ravel().tolist()
        right += y.parts.ravel().tolist()
    return Rule(pair.name, tuple(left), tuple(right))


def _results(nodes: Sequence[Node], side: str) -> list[tuple[Held, ...]]:
    if len(nodes) > SIZE:
        raise Refusal("unsupported", f"the {side} graph has {len(nodes)} operators, and no more than {SIZE} are looked at")
    found: list[tuple[Held, ...]] = []
    for k, node in enumerate(nodes):
        where = f"{side} operator {k} ({node.kind})"
        operands = [_place(found, place, f"operand {i + 1} of {where}") for i, place in enumerate(node.inputs)]
        if node.kind not in OPERATORS:
            raise Refusal("unsupported", f"{where}: the rule language has no word for it")
        count, run = OPERATORS[node.kind]
        if len(operands) != count:
            raise Refusal("ill-typed", f"{where} takes {count} operands, and has {len(operands)}")
        found.append(run(_Step(where, node.parameters), *operands))
    return found


def _place(found: Sequence[tuple[Held, ...]], place: tuple[int, int], what: str) -> Held:
    operator, result = place
    if operator < 0:
        return _held([[[Variable(f"{'x' if operator > -4 else 'w'}{-operator}")]]])
    if operator >= len(found):
        raise Refusal("ill-typed", f"{what} is operator {operator}, which does not come before it")
    if not 0 <= result < len(found[operator]):
        raise Refusal("ill-typed", f"{what} is result {result} of operator {operator}, which it does not have")
    return found[operator][result]


def _held(parts: list) -> Held:
    shape = np.shape(np.empty((len(parts), len(parts[0]), len(parts[0][0]))))
    array = np.empty(shape, object)
    for at in np.ndindex(*shape):
        array[at] = parts[at[0]][at[1]][at[2]]
    return Held(array)


def _degrees(x: Held) -> str:
    return "·".join(map(str, x.degrees))


@dataclass(frozen=True)
class _Step:
    """An operator of a rule: where it stands, and its parameters."""

    where: str
    parameters: Mapping[str, int] = field(default_factory=dict)

    def fail(self, why: str) -> Refusal:
        return Refusal("ill-typed", f"{self.where}: {why}")

    def number(self, name: str, default: int | None = None) -> int:
        found = self.parameters.get(name, default)
        if found is None:
            raise self.fail(f"there is no parameter {name}")
        return found

    def dim(self, name: str) -> int:
        found = self.number(name)
        if not 0 <= found <= CHANNEL:
            raise self.fail(f"{name} is {found}, and a tensor has dimensions 0, 1 and 2")
        return found

    def change(self) -> tuple[int, int]:
        """The dimension and the degree of a parallelization operator."""
        dim, degree = self.dim("PM_PARALLEL_DIM"), self.number("PM_PARALLEL_DEGREE")
        if degree < 2:
            raise self.fail(f"a degree of {degree} is none")
        if degree > DEGREE:
            raise Refusal("unsupported", f"{self.where}: a degree of {degree}, and no more than {DEGREE} are looked at")
        return dim, degree


# Parallelization


def _partition(step: _Step, x: Held) -> tuple[Held, ...]:
    dim, k = step.change()
    return (replace(x, degrees=x.times(dim, k)),)


def _combine(step: _Step, x: Held) -> tuple[Held, ...]:
    dim, k = step.change()
    if x.degrees[dim] % k:
        raise step.fail(f"the operand's {DIMENSIONS[dim]} degree is {x.degrees[dim]}: there are no {k} pieces to combine")
    return (replace(x, degrees=x.over(dim, k)),)


def _replicate(step: _Step, x: Held) -> tuple[Held, ...]:
    dim, k = step.change()
    if x.parts.size * k > PARTS:
        raise Refusal("unsupported", f"{step.where}: more than {PARTS} copies")
    seams = _scaled(x.seams, dim, lambda at: at * k)
    return (replace(x, parts=np.repeat(x.parts, k, dim), degrees=x.times(dim, k), seams=seams),)


def _reduce(step: _Step, x: Held) -> tuple[Held, ...]:
    dim, k = step.change()
    count, degree = x.parts.shape[dim], x.degrees[dim]
    if count % k:
        raise step.fail(f"the operand is no partial sum: {_instead(dim, count, degree)}")
    if degree > 1 and degree % k:
        raise step.fail(f"the operand's {DIMENSIONS[dim]} degree is {degree}, which {k} does not divide")
    groups = np.split(x.parts, count // k, dim)
    parts = np.concatenate([_sum(np.split(g, k, dim)) for g in groups], dim)
    degrees = x.over(dim, k) if degree > 1 else x.degrees
    return (Held(parts, degrees, x.partial and parts.shape[REPLICA] > 1, _scaled(x.seams, dim, lambda at: at // k)),)


def _instead(dim: int, count: int, degree: int) -> str:
    """What an operand is that has no addends."""
    if dim == REPLICA:
        return f"it has {count} replica{'s' * (count > 1)}"
    return f"its {DIMENSIONS[dim]}s are {'slices' if degree > 1 else 'those'} of one tensor, not addends"


def _scaled(seams: tuple[tuple[int, ...], ...], dim: int, change: Callable[[int], int]) -> tuple[tuple[int, ...], ...]:
    """Seams of the replica dimension are counted in replicas."""
    return (tuple(map(change, seams[REPLICA])), *seams[1:]) if dim == REPLICA else seams


def _sum(parts: Sequence[np.ndarray]) -> np.ndarray:
    return reduce(lambda x, y: _each("add", (), x, y), parts)


def _each(name: str, attributes: tuple[int | str, ...], *operands: np.ndarray) -> np.ndarray:
    """An operator of this language for every part."""
    found = np.empty(operands[0].shape, object)
    for at in np.ndindex(*found.shape):
        found[at] = Apply(name, attributes, tuple(x.item(*at) for x in operands))
    return found


# Computation


def _agree(step: _Step, x: Held, y: Held) -> None:
    if x.degrees != y.degrees:
        raise step.fail(f"operand 1 has degrees {_degrees(x)}, operand 2 {_degrees(y)}")


def _elementwise(name: str) -> Callable[[_Step, Held, Held], tuple[Held, ...]]:
    def run(step: _Step, x: Held, y: Held) -> tuple[Held, ...]:
        _agree(step, x, y)
        for dim, what in enumerate(DIMENSIONS):
            one, two = x.parts.shape[dim], y.parts.shape[dim]
            if one != two:
                raise step.fail(f"operand 1 holds {one} parts in its {what} dimension, operand 2 {two}")
        if (x.partial or y.partial) and (name != "add" or not (x.partial and y.partial)):
            raise step.fail(f"{'operand 1' if x.partial else 'operand 2'} is a partial sum")
        return (replace(x, parts=_each(name, (), x.parts, y.parts)),)

    return run


def _function(name: str) -> Callable[[_Step, Held], tuple[Held, ...]]:
    def run(step: _Step, x: Held) -> tuple[Held, ...]:
        if x.partial:
            raise step.fail(f"the operand is a partial sum, of which {name} cannot be taken before it is reduced")
        return (replace(x, parts=_each("map", (name,), x.parts)),)

    return run


def _concat(step: _Step, x: Held, y: Held) -> tuple[Held, ...]:
    _agree(step, x, y)
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


def _split(step: _Step, x: Held) -> tuple[Held, ...]:
    dim = step.dim("PM_AXIS")
    if step.number("PM_NUM_OUTPUTS", 2) != 2:
        raise Refusal("unsupported", f"{step.where}: a Split undoes a Concat of two")
    if not x.seams[dim]:
        raise step.fail(f"the operand was not concatenated in its {DIMENSIONS[dim]} dimension: there is nothing to split")
    *rest, at = x.seams[dim]
    seams = tuple(tuple(rest) if d == dim else s for d, s in enumerate(x.seams))
    pieces = [x.parts[:at], x.parts[at:]] if dim == REPLICA else [_results_of(x.parts, dim, result) for result in (0, 1)]
    return tuple(replace(x, parts=p, seams=seams) for p in pieces)


def _results_of(parts: np.ndarray, dim: int, result: int) -> np.ndarray:
    found = np.empty(parts.shape, object)
    for at in np.ndindex(*parts.shape):
        found[at] = Apply("split", (dim - 3,), (parts.item(*at),), result)
    return found


def _linear(step: _Step, x: Held, w: Held) -> tuple[Held, ...]:
    """`x · wᵀ`: x [replica, n, c] by w [replica, out, in]."""
    for one, two, what in ((SAMPLE, REPLICA, "samples"), (REPLICA, SAMPLE, "outputs"), (CHANNEL, CHANNEL, "channels")):
        if x.degrees[one] != w.degrees[two]:
            pair = f"operand 1 has {DIMENSIONS[one]} degree {x.degrees[one]}, operand 2 {DIMENSIONS[two]} degree {w.degrees[two]}"
            raise step.fail(f"{pair}, and the {what} of both lie along the same axes")
    for k, h in enumerate((x, w)):
        differing = [p for p in h.parts[1:] if (p != h.parts[0]).any()]
        if differing:
            two = f"{print_term(h.parts[0].item(0))}; {print_term(differing[0].item(0))}"
            raise step.fail(f"operand {k + 1} has {len(h.parts)} replicas that differ [{two}], and a Linear reads one of them")
    products = _products(step, x.parts[0], w.parts[0], x.degrees[CHANNEL])
    held = Held(
        products,
        (x.degrees[CHANNEL], x.degrees[SAMPLE], x.degrees[REPLICA]),
        len(products) > 1,
        ((), x.seams[SAMPLE], w.seams[SAMPLE]),
    )
    number = step.number("PM_ACTI", 0)
    if number not in ACTIVATIONS:
        raise Refusal("unsupported", f"{step.where}: no activation has number {number}")
    name = ACTIVATIONS[number]
    if name and held.partial:
        raise step.fail(f"the result is a partial sum, because the operands' channels are partitioned: {name} is fused too early")
    return (replace(held, parts=_each("map", (name,), held.parts)) if name else held,)


def _products(step: _Step, x: np.ndarray, w: np.ndarray, degree: int) -> np.ndarray:
    """Parts of x [copies in samples, in channels] by parts of w: `[addends, copies in samples, copies in outputs]`."""
    if x.shape[1] != w.shape[1]:
        raise step.fail(f"operand 1 holds {x.shape[1]} copies in its channels, operand 2 {w.shape[1]}")
    x, w = (_sliced(step, parts, degree) for parts in (x, w))
    addends = max(degree, 1)
    found = np.empty((addends, x.shape[0], w.shape[0]), object)
    for j, s, o in product(*map(range, found.shape)):
        terms = [_product(x.item(s, c), w.item(o, c)) for c in range(j, x.shape[1], addends)]
        found[j, s, o] = reduce(lambda a, b: Apply("add", (), (a, b)), terms)
    return found


def _sliced(step: _Step, parts: np.ndarray, degree: int) -> np.ndarray:
    """Parts of channels, at least as many as devices hold them: what is one part is cut in halves."""
    while parts.shape[1] < degree:
        parts = np.concatenate([parts[:, :, None], parts[:, :, None]], 2)
        parts = parts.reshape(len(parts), -1)
        for s, c in np.ndindex(*parts.shape):
            parts[s, c] = Apply("split", (-1,), (parts.item(s, c),), c % 2)
    if parts.shape[1] % degree:
        raise step.fail(f"{degree} devices do not hold whole parts of {parts.shape[1]}")
    return parts


def _product(x: Term, w: Term) -> Term:
    return Apply("matmul", (), (x, Apply("transpose", (), (w,))))


OPERATORS: dict[str, tuple[int, Callable[..., tuple[Held, ...]]]] = {
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
