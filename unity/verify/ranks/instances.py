"""Rules at concrete ranks and sizes: where they are run, and how false ones are refuted.

The same operators (`operators.py`) are evaluated on arrays of integers. To sample sizes and attributes, a vector is an array of
many candidates for one dimension, and the rule's conditions and the operators' requirements select the legal ones. To run a side,
a vector has an array of indices for each dimension of the group."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unity.verify.ranks.denotation import Reader
from unity.verify.ranks.forms import GENERIC, INDEX, MONOIDS, TRUTH, kind_of
from unity.verify.ranks.operators import PARTIAL, Index, RankTensor, Vector
from unity.verify.ranks.rule import RankRule, Signature, names_in, names_of, signature

CANDIDATES = 6_000  # combinations of sizes and attributes of a dimension, before those that are not legal are left out
LARGEST, WIDEST = 5, 8  # sizes: at most instances, and at some
MOST = 300_000  # indices of a side and its sums together


@dataclass(frozen=True)
class Instance:
    """A rule's variables at concrete ranks and sizes.

    Attributes:
        ranks: the number of dimensions of each group.
        numbers: each size or attribute, with a value for every dimension of its group.
        arrays: each tensor; its dimensions are those of its groups in turn.
        permutation: the places of all dimensions of all groups, in the order that each variable order of the rule gives them.
    """

    ranks: dict[str, int]
    numbers: dict[str, tuple[int, ...]]
    arrays: dict[str, np.ndarray]
    permutation: dict[str, dict[tuple[str, int], int]] = field(default_factory=dict)

    def __str__(self) -> str:
        numbers = ", ".join(f"{k} = {list(v)}" for k, v in self.numbers.items())
        return f"{numbers}; {', '.join(f'{k} = {v.tolist()}' for k, v in self.arrays.items())}"


class TooLarge(Exception):
    """An instance that would take too much memory."""


@dataclass(frozen=True)
class Elements:
    """Elements, and where they are defined."""

    value: Any
    defined: Any = True


class Concrete:
    """The domain of arrays."""

    def __init__(self, signature: Signature, instance: Instance) -> None:
        self.signature, self.instance = signature, instance
        self.legal: dict[str, Any] = {}  # for each group whether its requirements are met
        self.axes, self.volume = 0, 1  # of the indices at which elements are evaluated

    def rank(self, group: str) -> int:
        """Return the number of dimensions of a group."""
        return self.instance.ranks.get(group, 1)

    def number(self, name: str, group: str) -> Vector:
        """Return a size or an attribute."""
        return self.instance.numbers[name]

    def scalar(self, name: str) -> Any:
        """Return a scalar as a number."""
        return self.instance.arrays[name][()]

    def every(self, group: str, conditions: Vector) -> Any:
        """Return where conditions hold of all dimensions."""
        return self.both(*conditions)

    def both(self, *conditions: Any) -> Any:
        """Return where all conditions hold."""
        result: Any = True
        for c in conditions:
            result = np.logical_and(result, c)
        return result

    def choose(self, condition: Any, yes: Any, no: Any) -> Any:
        """Return one of two values, place by place."""
        if isinstance(yes, Elements):
            return Elements(np.where(condition, yes.value, no.value), np.where(condition, yes.defined, no.defined))
        return np.where(condition, yes, no)

    def whole(self, number: Any) -> Any:
        """Return where numbers are whole."""
        return number == np.round(number)

    def quotient(self, number: Any, divisor: Any) -> tuple[Any, Any]:
        """Return quotient and remainder; of a division by zero, anything."""
        divisor = np.where(np.equal(divisor, 0), 1, divisor)
        return np.floor_divide(number, divisor), np.mod(number, divisor)

    def element(self, number: Any) -> Any:
        """Return an integer as an element."""
        return Elements(np.asarray(number))

    def shared(self, tensor: RankTensor) -> RankTensor:
        """Return the tensor: its elements are evaluated for each reader."""
        return tensor

    def look_up(self, index: Any, size: Any, element: Callable[[Any], Any]) -> Any:
        """Return elements at indices."""
        value = element(index.value)
        return Elements(value.value, self.both(index.defined, index.value >= 0, index.value < size, value.defined))

    def access(self, tensor: str, index: Index) -> Any:
        """Return elements of a variable; outside of it, anything."""
        array = self.instance.arrays[tensor]
        if not array.ndim:
            return Elements(array[()])
        places = np.broadcast_arrays(*(k for vector in index.values() for k in vector))
        if not array.size:
            return Elements(np.zeros(places[0].shape, array.dtype))
        return Elements(array[tuple(np.clip(p, 0, n - 1) for p, n in zip(places, array.shape, strict=True))])

    def apply(self, name: str, *elements: Any) -> Any:
        """Return an elementwise function of arrays."""
        if name == "constant":
            return Elements(elementwise(name, self.signature.integers)(*elements))
        if name == "select":
            chosen = self.choose(elements[0].value, *elements[1:])
            return Elements(chosen.value, self.both(elements[0].defined, chosen.defined))
        values = [e.value for e in elements]
        with np.errstate(all="ignore"):
            value = elementwise(name, self.signature.integers)(*values)
            defined = self.both(*(e.defined for e in elements), PARTIAL[name](self, *values) if name in PARTIAL else True)
        return Elements(value, defined)

    def reduce(self, monoid: str, boxes: Sequence[tuple[str, Vector]], body: Callable[[tuple[Vector, ...]], Any]) -> Any:
        """Combine elements along new leading axes of arrays."""
        index, before = [], self.axes
        for _, sizes in boxes:
            vector = []
            for n in sizes:
                vector.append(np.arange(int(n)).reshape(-1, *(1,) * self.axes))
                self.axes += 1
            index.append(tuple(vector))
        lengths = [int(n) for _, sizes in boxes for n in sizes][::-1]
        outer = self.volume
        self._occupy(lengths)
        terms = body(tuple(index))
        self.axes, self.volume = before, outer
        if not lengths:
            return terms
        name, unit = monoid_at_instances(monoid, self.signature.integers)
        function = elementwise(name, self.signature.integers)

        def combined(array: Any, function: Any, unit: Any) -> np.ndarray:
            array = np.asarray(array)
            shape = (1,) * (before + len(lengths) - array.ndim) + array.shape
            array = np.broadcast_to(array.reshape(shape), (*lengths, *shape[len(lengths) :]))
            with np.errstate(all="ignore"):
                return function.reduce(array, axis=tuple(range(len(lengths))), initial=unit)

        return Elements(combined(terms.value, function, unit), combined(terms.defined, np.logical_and, True))

    def _occupy(self, lengths: Sequence[int]) -> None:
        self.volume *= math.prod(max(1, n) for n in lengths)
        if self.volume > MOST:
            raise TooLarge

    def require(self, group: str, conditions: Vector) -> None:
        """Note where an operator is defined."""
        self.legal[group] = self.both(self.legal.get(group, True), *conditions)

    def array(self, tensor: RankTensor) -> tuple[np.ndarray, np.ndarray]:
        """Return all elements of a tensor, and where they are defined."""
        sizes = [int(n) for g in tensor.sizes for n in tensor.sizes[g]]
        self.axes, self.volume, index, axis = len(sizes), 1, {}, 0
        self._occupy(sizes)
        for g, vector in tensor.sizes.items():
            index[g] = tuple(np.arange(int(n)).reshape((-1,) + (1,) * (len(sizes) - axis - k - 1)) for k, n in enumerate(vector))
            axis += len(vector)
        elements = tensor.at(index)
        return np.broadcast_to(elements.value, tuple(sizes)), np.broadcast_to(elements.defined, tuple(sizes))


def _mixed(*elements: Any) -> Any:
    """Return an arbitrary function of its operands, in which none is like another."""
    total = 0.0
    for k, e in enumerate(elements):
        total = total * 1.7 + e * (1 + k) + 0.25 * e**2
    return total + 1.3


NAMES = {
    **{
        "neg": "negative",
        "mul": "multiply",
        "sub": "subtract",
        "div": "divide",
        "max": "maximum",
        "min": "minimum",
        "pow": "power",
    },
    **{"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"},
}


def elementwise(name: str, integers: bool) -> Callable[..., Any]:
    """Return an elementwise function by its name in the rule language."""
    special: dict[str, Callable[..., Any]] = {
        "constant": lambda value: np.asarray(value if isinstance(value, bool) or integers else float(value)),
        "least": lambda: np.asarray(np.iinfo(np.int32).min if integers else -np.inf),
        "greatest": lambda: np.asarray(np.iinfo(np.int32).max if integers else np.inf),
        "clamp": lambda lo, x, hi: np.minimum(np.maximum(x, lo), hi),
        "select": np.where,
        "rem": lambda x, y: np.where(np.equal(y, 0), np.nan, np.fmod(x, np.where(np.equal(y, 0), 1, y))),
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "erf": np.vectorize(math.erf, [float]),
        **dict.fromkeys(GENERIC, _mixed),
    }
    return special[name] if name in special else getattr(np, NAMES.get(name, name))


def monoid_at_instances(monoid: str, integers: bool) -> tuple[str, Any]:
    """Return the operator and the unit by which a reduction is run; a product stands for an unknown monoid."""
    name = "mul" if MONOIDS[monoid].unit is None else monoid
    unit = MONOIDS[name].unit
    return name, elementwise(unit, integers)()[()] if isinstance(unit, str) else unit


def instances(rule: RankRule, seed: int, number: int, largest_rank: int = 2) -> Iterator[Instance]:
    """Yield legal instances of a rule at random; fewer if it has hardly any."""
    generator = np.random.default_rng(seed)
    shape = signature(rule)
    dims = {name for tensor in shape.tensors.values() for _, size in tensor for name in names_in(size)}
    for k in range(number):
        largest, low, high = (WIDEST if k % 4 == 3 else LARGEST), (1 if k % 4 == 1 else 0), largest_rank + (k % 8 == 6)
        scalars = {n: _elements(generator, n, (), shape) for n, groups in shape.tensors.items() if not groups}
        tables = _tables(rule, shape, scalars, dims, largest, generator)
        ranks, numbers = {}, {}
        for group in shape.groups:
            least = 1 if group in shape.nonempty else low
            ranks[group] = 1 if group in shape.single else int(generator.integers(least, max(least, high) + 1))
            rows = tables[group]
            if not rows["#"] and ranks[group]:
                break
            chosen = generator.integers(0, max(1, rows["#"]), ranks[group])
            numbers |= {name: tuple(int(column[c]) for c in chosen) for name, column in rows.items() if name != "#"}
        else:
            reader = Reader(Concrete(shape, Instance(ranks, numbers, scalars)), shape)
            if all(_holds(c, reader) for c in rule.conditions):
                sizes = {n: [int(k) for g, size in groups for k in reader.integers(size, g)] for n, groups in shape.tensors.items()}
                arrays = {n: scalars[n] if n in scalars else _elements(generator, n, tuple(s), shape) for n, s in sizes.items()}
                if all(math.prod(s) < 20_000 for s in sizes.values()):
                    yield Instance(ranks, numbers, arrays, _orders(rule, ranks, generator))


def _orders(rule: RankRule, ranks: dict[str, int], generator: np.random.Generator) -> dict[str, dict[tuple[str, int], int]]:
    dimensions = [(g, k) for g, r in ranks.items() for k in range(r)]
    orders = sorted(names_of("transpose", rule))
    return {order: dict(zip(dimensions, generator.permutation(len(dimensions)).tolist(), strict=True)) for order in orders}


def _elements(generator: np.random.Generator, name: str, sizes: tuple[int, ...], shape: Signature) -> np.ndarray:
    """Return random elements: truth values, or numbers: small ones, with zeros and equal ones among them, and some large ones."""
    if kind_of(name) == TRUTH:
        return np.asarray(generator.random(sizes) < 0.5)
    if kind_of(name) == INDEX:
        return np.asarray(generator.integers(0, 4, sizes) - (generator.random(sizes) < 0.05))
    small, large = (generator.integers(1 if name in shape.positive else low, high, sizes) for low, high in ((-4, 7), (-200, 201)))
    values = np.asarray(np.where(generator.random(sizes) < (0 if shape.powers else 0.1 if sizes else 0.25), large, small))
    return values if shape.integers else values + np.asarray(generator.integers(0, 4, sizes)) * 0.25


def _tables(
    rule: RankRule, shape: Signature, scalars: dict, dims: set[str], largest: int, generator: np.random.Generator
) -> dict[str, dict[str, Any]]:
    """Return for each group legal values of its numbers, a column for each number, and their count as `#`."""
    tables: dict[str, dict[str, Any]] = {}
    numbers = {n: (generator.integers(0 if n in dims else -3, largest + 1, CANDIDATES),) for n in shape.numbers}
    everything = Instance(dict.fromkeys(shape.groups, 1), numbers, scalars)  # type: ignore[arg-type]
    domain = Concrete(shape, everything)
    reader = Reader(domain, shape)
    reader.tensor(rule.left)
    for group, size in (dimension for tensor in shape.tensors.values() for dimension in tensor):
        domain.require(group, tuple(n >= 0 for n in reader.integers(size, group)))
    for node in rule.conditions:
        if not _is_call(node):
            domain.require(reader.condition_group(node), reader.condition(node, reader.condition_group(node)))
    for group in shape.groups:
        legal = np.broadcast_to(domain.legal.get(group, True), (CANDIDATES,))
        tables[group] = {n: numbers[n][0][legal] for n, g in shape.numbers.items() if g == group}
        tables[group]["#"] = int(legal.sum())
    return tables


def _is_call(node: Any) -> bool:
    return isinstance(node, ast.Call)


def _holds(node: Any, reader: Reader) -> bool:
    """Return whether a condition holds at an instance."""
    if _is_call(node):
        if node.func.id != "some":
            return True
        node = node.args[0]
        return bool(np.any(np.asarray(reader.condition(node, reader.condition_group(node)))))
    return bool(np.all(np.asarray(reader.condition(node, reader.condition_group(node)))))


@dataclass(frozen=True)
class RuleRun:
    """The run of a rule at an instance.

    Attributes:
        difference: how the sides differ where the left one is defined; empty if they do not.
        substantial: whether every group has a dimension, and the left side a defined element.
    """

    difference: str
    substantial: bool = False


def run(rule: RankRule, shape: Signature, instance: Instance) -> RuleRun:
    """Run a rule at a legal instance.

    Raises:
        TooLarge: the instance takes too much memory.
    """
    domain = Concrete(shape, instance)
    reader = Reader(domain, shape)
    left = reader.tensor(rule.left)
    domain.legal.clear()
    right = reader.tensor(rule.right)
    if not all(np.all(x) for x in domain.legal.values()):
        return RuleRun("the right side is not defined")
    if {g: list(map(int, n)) for g, n in left.sizes.items()} != {g: list(map(int, n)) for g, n in right.sizes.items()}:
        return RuleRun("the sides have different shapes")
    right = RankTensor({g: right.sizes[g] for g in left.sizes}, right.at, right.order)
    (a, where), (b, defined) = domain.array(left), domain.array(right)
    if not np.all(defined | ~where):
        return RuleRun("an element of the right side is not defined")
    if compare(a, b, where):
        return RuleRun("", all(instance.ranks.values()) and bool(np.any(where)))
    return RuleRun(f"{a.tolist()} is not {b.tolist()}")


def compare(a: np.ndarray, b: np.ndarray, where: Any = True, tolerance: float = 1e-7, infinite: bool = True) -> bool:
    """Return whether two arrays are equal, wherever the first is a number.

    Args:
        a: an array.
        b: another.
        where: the places that count.
        tolerance: relative and absolute.
        infinite: whether infinity is a number; else it is an overflow of the first.
    """
    with np.errstate(all="ignore"):
        return a.shape == b.shape and bool(
            np.all(
                (a == b)
                | ~np.asarray(where)
                | np.isnan(a)
                | (np.isinf(a) & (not infinite))
                | np.isclose(a, b, rtol=tolerance, atol=tolerance)
            )
        )


@dataclass(frozen=True)
class Runs:
    """The runs of a rule at instances.

    Attributes:
        counterexample: an instance at which the sides differ, and how; empty if the sides agree.
        number: of instances.
        substantial: of substantial ones (`RuleRun`).
    """

    counterexample: str
    number: int
    substantial: int


def refute(rule: RankRule, seed: int = 0, number: int = 60) -> Runs:
    """Run a rule until an instance refutes it."""
    shape = signature(rule)
    runs = substantial = 0
    for instance in instances(rule, seed, number):
        try:
            outcome = run(rule, shape, instance)
        except TooLarge:
            continue
        runs += 1
        if outcome.difference:
            return Runs(f"{instance}: {outcome.difference}", runs, substantial)
        substantial += outcome.substantial
    return Runs("", runs, substantial)
