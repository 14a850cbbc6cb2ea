"""Translation of TASO's released rules into this rule language.

Where the file leaves something open, it is read as follows.

- Inputs are numbered downwards from -1 and become `x1`, `x2`, …. Their ranks follow from the operators, and are 2 otherwise.
- A convolution of the source graph has one group. The groups of the target's convolutions follow from the shapes, as in a program:
  channels of the image over inputs of the kernel. If no sizes fit that, the target's convolutions have one group instead.
- A constant has the shape of the other operand of its first reader: the identity matrix that of the matrix that it multiplies, a
  kernel that of the image.
- A permutation is a number in base `numdim`, its first digit the most significant. `linear` is a matrix product.

An operator or a parameter that the rule language lacks makes its rule *unsupported*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unity.substitutions.importing.sizes import SizeProblem, fits
from unity.substitutions.importing.taso_protobuf import TasoOperator, TasoRule, read_rules
from unity.substitutions.importing.verdict import Case, Imported, Judge, Refusal, Verdict
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, Term, Variable

# fmt: off
KINDS: tuple[str, ...] = ("input", "weight", "any", "conv2d", "dropout", "linear", "pool2d-max", "pool2d-avg", "relu",
    "sigmoid", "tanh", "batchnorm", "concat", "split", "reshape", "transpose", "ew-add", "ew-mul", "matmul", "mul", "enlarge",
    "merge-gconv", "constant-imm", "constant-iconv", "constant-one", "constant-pool")
PARAMETERS: tuple[str, ...] = ("op-type", "num-inputs", "num-outputs", "group", "kernel-h", "kernel-w", "stride-h", "stride-w",
    "pad", "acti", "numdim", "axis", "perm", "outshuffle", "merge-gconv-count")
# fmt: on
ACTIVATIONS = (None, "sigmoid", "relu", "tanh")
PADDINGS = ("same", "valid")
CONSTANTS = ("constant-imm", "constant-iconv", "constant-one", "constant-pool")
RANK, WINDOW, SIZE = 8, 15, 16  # the largest rank, kernel or stride, and number of operators of a graph
RANKS = {"conv2d": 4, "pool2d-max": 4, "pool2d-avg": 4, "enlarge": 4, "constant-iconv": 4, "constant-pool": 4, "constant-imm": 2}
INPUTS = {"conv2d": 2, "linear": 2, "ew-add": 2, "ew-mul": 2, "matmul": 2, "mul": 2, **dict.fromkeys(CONSTANTS, 0)}


@dataclass
class Graph:
    """One side of a rule during translation: its operators, the terms of their results, and the sizes that they fix."""

    side: str
    operators: tuple[TasoOperator, ...]
    plain: bool  # whether its convolutions have one group
    terms: list[tuple[Term, ...]] = field(default_factory=list)
    fixed: list[tuple[Term, int, int]] = field(default_factory=list)

    def name(self, k: int) -> str:
        return f"{self.side} operator {k} ({_kind(self.operators[k])})"


def import_taso(path: str | Path) -> list[Imported]:
    """Return every rule of a released file, in its order, with the verdict. Raises RuleError for a file that cannot be read."""
    released = read_rules(Path(path).read_bytes())
    return Judge().decide([_case(f"taso-{number}", rule) for number, rule in enumerate(released)])


def _case(name: str, released: TasoRule) -> Case | Imported:
    """Translate a rule. If no sizes fit a source whose convolutions have one group, those of the target have one."""
    try:
        case = translate(name, released)
        return case if fits(case.problem) else translate(name, released, plain=False)
    except Refusal as refusal:
        return Imported(name, None, Verdict(refusal.status, str(refusal)))


def translate(name: str, released: TasoRule, plain: bool = True) -> Case:
    """Translate a rule, with constraints on its sizes. Raises Refusal.

    Args:
        name: of the rule.
        released: the rule.
        plain: whether the convolutions of the source graph have one group, or else those of the target.
    """
    source, target = Graph("source", released.source, plain), Graph("target", released.target, not plain)
    for graph in (source, target):
        if len(graph.operators) > SIZE:
            count = f"the {graph.side} graph has {len(graph.operators)} operators"
            raise Refusal("unsupported", f"{count}, and at most {SIZE} are supported")
    ranks = _Ranks(source, target)
    for graph in (source, target):
        for k in range(len(graph.operators)):
            graph.terms.append(_translated(graph, k, ranks))
    left = tuple(_operand(source, place, "an output") for place, _ in released.outputs)
    right = tuple(_operand(target, place, "an output") for _, place in released.outputs)
    rule = Rule(name, left, right)
    fixed = (*source.fixed, *target.fixed)
    return Case(rule, SizeProblem(rule.sides, {v: ranks.of(v) for v in rule.variables}, fixed))


def _kind(operator: TasoOperator) -> str:
    return KINDS[operator.kind] if 0 <= operator.kind < len(KINDS) else f"type {operator.kind}"


def _parameter(graph: Graph, k: int, name: str, default: int | None = None) -> int:
    value = graph.operators[k].parameters.get(PARAMETERS.index(name), default)
    if value is None:
        raise Refusal("ill-typed", f"{graph.name(k)} has no parameter {name}")
    return value


def _operand(graph: Graph, place: tuple[int, int], where: str) -> Term:
    """Return the term of an operator's result, or an input variable."""
    operator, result = place
    if operator < 0:
        return Variable(f"x{-operator}")
    if operator >= len(graph.terms):
        raise Refusal("ill-typed", f"{where} of the {graph.side} graph is operator {operator}, which does not come before it")
    if not 0 <= result < len(graph.terms[operator]):
        raise Refusal("ill-typed", f"{where} is result {result} of {graph.name(operator)}, which it does not have")
    return graph.terms[operator][result]


class _Ranks:
    """The ranks of all tensors of a rule: union-find of those that are equal, some of them fixed by operators."""

    def __init__(self, *graphs: Graph) -> None:
        self.parent: dict[object, object] = {}
        self.rank: dict[object, int] = {}
        for graph in graphs:
            for k, operator in enumerate(graph.operators):
                self._add(graph, k, [self._key(graph, i) for i, _ in operator.inputs])

    @staticmethod
    def _key(graph: Graph, operator: int) -> object:
        return f"x{-operator}" if operator < 0 else (graph.side, operator)

    def _add(self, graph: Graph, k: int, inputs: list[object]) -> None:
        """Add the constraints of an operator."""
        kind, own = _kind(graph.operators[k]), self._key(graph, k)
        if kind == "mul" and len(inputs) == 2:
            self._fix(graph, k, inputs.pop(), 0)
        if kind != "reshape":
            for x in inputs:
                self._join(graph, k, x, own)
        rank = RANKS.get(kind) or graph.operators[k].parameters.get(PARAMETERS.index("numdim"))
        if rank:
            self._fix(graph, k, own, rank)

    def _root(self, key: object) -> object:
        while key in self.parent:
            key = self.parent[key]
        return key

    def _fix(self, graph: Graph, k: int, key: object, rank: int) -> None:
        if not 0 <= rank <= RANK:
            raise Refusal("unsupported", f"{graph.name(k)}: a rank of {rank}, and at most {RANK} is supported")
        other = self.rank.setdefault(self._root(key), rank)
        if other != rank:
            raise Refusal("ill-typed", f"{graph.name(k)}: an operand has rank {other}, and must have rank {rank}")

    def _join(self, graph: Graph, k: int, key: object, other: object) -> None:
        one, two = self._root(key), self._root(other)
        if one is two or one == two:
            return
        self.parent[one] = two
        if one in self.rank:
            self._fix(graph, k, two, self.rank[one])

    def of(self, key: object) -> int:
        """Return the rank of a tensor."""
        return self.rank.get(self._root(key), 2)


def _translated(graph: Graph, k: int, ranks: _Ranks) -> tuple[Term, ...]:
    """Return the terms of an operator's results."""
    operator, kind = graph.operators[k], _kind(graph.operators[k])
    xs = [_operand(graph, place, f"operand {i + 1} of {graph.name(k)}") for i, place in enumerate(operator.inputs)]
    if kind in CONSTANTS:
        return (_constant(graph, k, kind),)
    if kind not in TRANSLATIONS:
        raise Refusal("unsupported", f"{graph.name(k)}: the rule language has no such operator")
    count = INPUTS.get(kind, len(xs) if kind == "concat" else 1)
    if len(xs) != count:
        raise Refusal("ill-typed", f"{graph.name(k)} takes {count} operands, and has {len(xs)}")
    return TRANSLATIONS[kind](graph, k, xs, ranks.of((graph.side, k)))


def _simple(name: str) -> Callable[..., tuple[Term, ...]]:
    """Return the translation of an operator without attributes, with its fused activation if it has one."""

    def build(graph: Graph, k: int, xs: Sequence[Term], rank: int) -> tuple[Term, ...]:
        return _activated(graph, k, Apply(name, (), tuple(xs)))

    return build


def _function(name: str) -> Callable[..., tuple[Term, ...]]:
    def build(graph: Graph, k: int, xs: Sequence[Term], rank: int) -> tuple[Term, ...]:
        return (Apply("map", (name,), tuple(xs)),)

    return build


def _pool(name: str) -> Callable[..., tuple[Term, ...]]:
    def build(graph: Graph, k: int, xs: Sequence[Term], rank: int) -> tuple[Term, ...]:
        window = _square(graph, k, "kernel-h", "kernel-w")
        return _activated(graph, k, Apply(name, (window, *_stride_and_padding(graph, k)), tuple(xs)))

    return build


def _activated(graph: Graph, k: int, term: Term) -> tuple[Term, ...]:
    """Apply the fused activation of an operator, if it has one."""
    number = _parameter(graph, k, "acti", 0)
    if not 0 <= number < len(ACTIVATIONS):
        raise Refusal("unsupported", f"{graph.name(k)}: no activation has number {number}")
    function = ACTIVATIONS[number]
    return (Apply("map", (function,), (term,)) if function else term,)


def _square(graph: Graph, k: int, height: str, width: str, default: int | None = None) -> int:
    """Return the side of a square given by two parameters."""
    h, w = _parameter(graph, k, height, default), _parameter(graph, k, width, default)
    if h != w or not 1 <= h <= WINDOW:
        why = "are not equal" if h != w else f"are not between 1 and {WINDOW}"
        raise Refusal("unsupported", f"{graph.name(k)}: {height} {h} and {width} {w} {why}")
    return h


def _stride_and_padding(graph: Graph, k: int) -> tuple[int, str]:
    padding = _parameter(graph, k, "pad", 0)
    if padding not in (0, 1):
        raise Refusal("unsupported", f"{graph.name(k)}: no padding has number {padding}")
    return _square(graph, k, "stride-h", "stride-w", 1), PADDINGS[padding]


def _convolution(graph: Graph, k: int, xs: Sequence[Term], rank: int) -> tuple[Term, ...]:
    for dim, name in ((2, "kernel-h"), (3, "kernel-w")):
        size = _parameter(graph, k, name)
        if not 1 <= size <= WINDOW:
            raise Refusal("unsupported", f"{graph.name(k)}: {name} {size} is not between 1 and {WINDOW}")
        graph.fixed.append((xs[1], dim, size))
    pool = isinstance(xs[1], Apply) and xs[1].operator == "mean_kernel"
    groups = 0 if pool else _parameter(graph, k, "group", 0) or (1 if graph.plain else f"{graph.side[0]}{k}")
    return _activated(graph, k, Apply("conv2d", (groups, *_stride_and_padding(graph, k)), tuple(xs)))


def _axis(graph: Graph, k: int, rank: int) -> int:
    """Return the axis of a concat or split, counted from the end."""
    axis = _parameter(graph, k, "axis")
    if not 0 <= axis < rank:
        raise Refusal("ill-typed", f"{graph.name(k)}: its operands have rank {rank}, and no dimension {axis}")
    return axis - rank


def _concat(graph: Graph, k: int, xs: Sequence[Term], rank: int) -> tuple[Term, ...]:
    if len(xs) != _parameter(graph, k, "num-inputs", len(xs)) or not xs:
        raise Refusal("ill-typed", f"{graph.name(k)} has {len(xs)} operands, which is not its parameter num-inputs")
    joined = xs[-1]
    for x in reversed(xs[:-1]):
        joined = Apply("concat", (_axis(graph, k, rank),), (x, joined))
    return (joined,)


def _split(graph: Graph, k: int, xs: Sequence[Term], rank: int) -> tuple[Term, ...]:
    results: list[Term] = []
    rest = xs[0]
    if not 1 <= _parameter(graph, k, "num-outputs", 2) <= SIZE:
        raise Refusal("unsupported", f"{graph.name(k)}: num-outputs is not between 1 and {SIZE}")
    for _ in range(_parameter(graph, k, "num-outputs", 2) - 1):
        parts = [Apply("split", (_axis(graph, k, rank),), (rest,), result) for result in (0, 1)]
        results.append(parts[0])
        rest = parts[1]
    return (*results, rest)


def _transpose(graph: Graph, k: int, xs: Sequence[Term], rank: int) -> tuple[Term, ...]:
    number, order = _parameter(graph, k, "perm"), []
    for _ in range(rank):
        number, digit = divmod(number, rank)
        order.insert(0, digit)
    identity = list(range(rank))
    if number or sorted(order) != identity:
        raise Refusal("ill-typed", f"{graph.name(k)}: {order} is not a permutation of {rank} dimensions")
    if order == identity:
        return (xs[0],)
    if order == [*identity[:-2], identity[-1], identity[-2]]:
        return (Apply("transpose", (), (xs[0],)),)
    raise Refusal("unsupported", f"{graph.name(k)}: the rule language can swap the last two dimensions alone, and this is {order}")


def _enlarge(graph: Graph, k: int, xs: Sequence[Term], rank: int) -> tuple[Term, ...]:
    return (Apply("enlarge", (_square(graph, k, "kernel-h", "kernel-w"),), (xs[0],)),)


def _constant(graph: Graph, k: int, kind: str) -> Term:
    """Return a constant in the shape of the other operand of its first reader."""
    for operator in graph.operators[k + 1 :]:
        places = [place for place, _ in operator.inputs]
        if k in places and len(places) == 2 and places != [k, k]:
            position = places.index(k)
            other = operator.inputs[1 - position]
            if other[0] > k:
                break
            partner = _operand(graph, other, f"the operand beside {graph.name(k)}")
            return _shaped(graph, k, kind, _kind(operator), position, partner)
    raise Refusal("unsupported", f"{graph.name(k)}: no operator that reads it determines its shape")


def _shaped(graph: Graph, k: int, kind: str, reader: str, position: int, partner: Term) -> Term:
    """Return a constant beside another operand of an operator."""
    if kind == "constant-imm" and reader in ("matmul", "linear"):
        return Apply("identity", (), (partner if position == 1 else Apply("transpose", (), (partner,)),))
    if kind in ("constant-iconv", "constant-pool") and reader == "conv2d" and position == 1:
        name = "identity_kernel" if kind == "constant-iconv" else "mean_kernel"
        return Apply(name, (_square(graph, k, "kernel-h", "kernel-w"),), (partner,))
    if kind == "constant-one" and reader in ("ew-add", "ew-mul"):
        return Apply("ones", (), (partner,))
    raise Refusal("unsupported", f"{graph.name(k)}: an operand of {reader} does not determine its shape")


TRANSLATIONS: dict[str, Callable[..., tuple[Term, ...]]] = {
    "conv2d": _convolution,
    "linear": _simple("matmul"),
    "matmul": _simple("matmul"),
    "ew-add": _simple("add"),
    "ew-mul": _simple("mul"),
    "mul": _simple("scale"),
    "relu": _function("relu"),
    "sigmoid": _function("sigmoid"),
    "tanh": _function("tanh"),
    "pool2d-max": _pool("maxpool"),
    "pool2d-avg": _pool("avgpool"),
    "concat": _concat,
    "split": _split,
    "transpose": _transpose,
    "enlarge": _enlarge,
}
