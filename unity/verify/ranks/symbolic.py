"""Terms on symbols, for Z3.

A vector over a group of dimensions is the integer of one generic dimension. A condition on all dimensions of a group is an opaque
truth value, an atom; so is the part of an index that lies in a group, an opaque integer. What they stand for is recorded with them,
and `prover.py` proves lemmas about it at the generic dimension. Groups of exactly one dimension are that dimension, and need no
atoms.

Sums are not evaluated. A value is an element, or a formal combination of summands over boxes of indices, into which products are
distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, count, permutations, product
from typing import Any

import z3

from unity.verify.ranks.forms import GENERIC, INDEX, MONOIDS, TRUTH, Inexpressible, OutOfReach, kind_of
from unity.verify.ranks.functions import LAWS, MEANINGS
from unity.verify.ranks.operators import PARTIAL, Index, RankTensor, Vector
from unity.verify.ranks.rule import Signature
from unity.verify.ranks.totals import NONNEGATIVE, POSITIVE, Totals, partial_function

Box = tuple[str, Vector]


@dataclass(frozen=True)
class Summand:
    """An element for every index of boxes."""

    boxes: tuple[Box, ...]
    body: Callable[[tuple[Vector, ...]], Any]


@dataclass(frozen=True)
class Sums:
    """The combination of the elements of all summands by a commutative monoid, and the condition under which it is defined."""

    monoid: str
    summands: tuple[Summand, ...]
    defined: Any


@dataclass(frozen=True)
class OpaqueCondition:
    """An opaque condition on all dimensions of a group, and its formula at the generic dimension."""

    symbol: Any
    group: str
    formula: Any

    @property
    def meaning(self) -> Any:
        """The formula."""
        return self.formula


@dataclass(frozen=True)
class OpaqueIndex:
    """The opaque part of an index in a group, and its integer at the generic dimension."""

    symbol: Any
    group: str
    number: Any

    @property
    def meaning(self) -> Any:
        """The integer."""
        return self.number


class SymbolicDomain:
    """The domain of symbols."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.context = z3.Context()
        self.integer = z3.IntSort(self.context)
        self.element_sort = self.integer if signature.integers else z3.RealSort(self.context)
        self.atoms: dict[tuple[str, str], OpaqueCondition] = {}
        self.parts: dict[tuple[str, str], OpaqueIndex] = {}
        self.definitions: dict[str, OpaqueCondition | OpaqueIndex] = {}  # of all atoms and parts so far, by name
        self.follows: Callable[[str, Any], bool] = lambda group, condition: False  # at any dimension of a group
        self.facts: list[Any] = []  # of elements, by their definition
        self.divisions: list[Any] = []  # of quotients and remainders, by their definition
        self.requirements: list[tuple[str, Any]] = []
        self._defined: dict[int, tuple[Any, Any]] = {}  # terms, by their number, and when they are defined
        self._applied: dict[str, list[Any]] = {}
        self._quotients: list[tuple[Any, Any]] = []
        self._numbers = count()
        self._depth = 0
        self._symbols: dict[tuple[str, str, str], Any] = {}
        self.totals = Totals(self)

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Forget afterwards the symbols of a question: they would distract from others. A name keeps its definition for ever."""
        saved = dict(self.atoms), dict(self.parts), list(self.divisions), list(self._quotients)
        applied = {name: list(values) for name, values in self._applied.items()}
        yield
        self.atoms, self.parts, self.divisions, self._quotients = saved
        self._applied = applied

    def rank(self, group: str) -> int:
        """Return 1: the generic dimension."""
        return 1

    def integer_symbol(self, name: str) -> Vector:
        """Return the vector of a symbol."""
        return (z3.Int(name, self.context),)

    def lifted(self, vector: Vector) -> Vector:
        """Return a vector with numbers as expressions."""
        return tuple(z3.IntVal(x, self.context) if isinstance(x, int) else x for x in vector)

    def number(self, name: str, group: str) -> Vector:
        """Return a size or an attribute of the generic dimension."""
        return self.integer_symbol(name)

    def scalar(self, name: str) -> Any:
        """Return a scalar as a number."""
        return self.access(name, {})

    def applied(self, name: str, sort: Any, *arguments: Any) -> Any:
        """Return the value of an unknown function."""
        return z3.Function(name, *(a.sort() for a in arguments), sort)(*arguments)

    def simplified(self, value: Any) -> Any:
        """Return a simpler expression of a value."""
        return z3.simplify(value)

    def truth(self, condition: Any) -> Any:
        """Return a condition as a formula."""
        return z3.BoolVal(condition, self.context) if isinstance(condition, bool) else condition

    def every(self, group: str, conditions: Vector) -> Any:
        """Return the atom of a condition on all dimensions of a group."""
        formula = z3.simplify(self.truth(conditions[0]))
        if group in self.signature.single or not group:
            return formula
        if z3.is_true(formula):
            return formula
        key = group, formula.sexpr()
        if key not in self.atoms:
            symbol = self._symbol("all", key, z3.BoolSort(self.context))
            self.atoms[key] = self.definitions[symbol.decl().name()] = OpaqueCondition(symbol, group, formula)
        return self.atoms[key].symbol

    def _symbol(self, kind: str, key: tuple[str, str], sort: Any) -> Any:
        """Return the symbol of an atom or a part, which is the same whenever it is asked for."""
        if (kind, *key) not in self._symbols:
            self._symbols[kind, *key] = z3.Const(f"{kind} {key[0]} {next(self._numbers)}", sort)
        return self._symbols[kind, *key]

    def again(self, definition: OpaqueCondition | OpaqueIndex, meaning: Any) -> Any:
        """Return the symbol of an atom or a part with another meaning."""
        if isinstance(definition, OpaqueCondition):
            return self.every(definition.group, (meaning,))
        return self.part(definition.group, meaning)

    def part(self, group: str, number: Any) -> Any:
        """Return the part of an index in a group."""
        number = z3.simplify(number)
        key = group, number.sexpr()
        if key not in self.parts:
            symbol = self._symbol("index part", key, self.integer)
            self.parts[key] = self.definitions[symbol.decl().name()] = OpaqueIndex(symbol, group, number)
        return self.parts[key].symbol

    def both(self, *conditions: Any) -> Any:
        """Return a conjunction."""
        parts = [c for c in conditions if c is not True]
        if len(parts) < 2:
            return parts[0] if parts else True
        return z3.And([self.truth(c) for c in parts])

    def choose(self, condition: Any, yes: Any, no: Any) -> Any:
        """Return one of two values; of sums, the summands of both, each the unit where the other is chosen."""
        if isinstance(condition, bool):
            return yes if condition else no
        if isinstance(yes, Sums) or isinstance(no, Sums):
            sums = yes if isinstance(yes, Sums) else no
            unit = self.unit(sums.monoid)
            first, second = self._summands(yes, sums.monoid), self._summands(no, sums.monoid)
            defined = z3.And(self.defined(condition), z3.If(condition, self.defined(yes), self.defined(no)))
            return Sums(sums.monoid, (
                *(Summand(s.boxes, lambda j, s=s: self.choose(condition, s.body(j), unit)) for s in first),
                *(Summand(s.boxes, lambda j, s=s: self.choose(condition, unit, s.body(j))) for s in second),
            ), defined)  # fmt: skip
        if isinstance(yes, bool) or isinstance(no, bool):
            yes, no = self.truth(yes), self.truth(no)
        if isinstance(yes, int) and isinstance(no, int):
            yes = z3.IntVal(yes, self.context)
        return z3.If(condition, yes, no)

    def whole(self, number: Any) -> Any:
        """Return whether a number is whole."""
        return z3.IsInt(number)

    def quotient(self, number: Any, divisor: Any) -> tuple[Any, Any]:
        """Return quotient and remainder; by symbols, they are functions that satisfy Euclid's equation."""
        if isinstance(divisor, int) and divisor < 1:
            raise Inexpressible(f"a quotient by {divisor}")
        if isinstance(divisor, int) and isinstance(number, int):
            return divmod(number, divisor)
        if isinstance(divisor, int):
            return number / divisor, number % divisor
        number = z3.IntVal(number, self.context) if isinstance(number, int) else z3.simplify(number)
        divisor = self.simplified(divisor)
        names = "quotient", "remainder"
        q, rest = (self.applied(name, self.integer, number, divisor) for name in names)
        for other, by in self._quotients:  # a shift by the divisor: nonlinear arithmetic does not see it
            if by.eq(divisor):
                a, b = (self.applied(name, self.integer, other, divisor) for name in names)
                self.divisions += [
                    z3.Implies(z3.And(divisor > 0, number == other + divisor), z3.And(q == a + 1, rest == b)),
                    z3.Implies(z3.And(divisor > 0, other == number + divisor), z3.And(a == q + 1, rest == b)),
                ]
        self._quotients.append((number, divisor))
        self.divisions += self._divisions_in_turn()
        self.divisions.append(z3.Implies(divisor > 0, z3.And(number == divisor * q + rest, rest >= 0, rest < divisor)))
        return q, rest

    def _divisions_in_turn(self) -> list[Any]:
        """Return that a division by `d` and then by `m` is one by `d * m`, where the last quotient takes part."""
        laws, zero = [], z3.IntVal(0, self.context)
        for (inner, d), (outer, m), (whole, dm) in permutations(self._quotients, 3):
            latest = any(self._quotients[-1][0].eq(x) for x in (inner, outer, whole))
            if latest and z3.simplify(d * m - dm, som=True).eq(zero):
                rest = self.applied("remainder", self.integer, inner, d)
                total = d * self.applied("remainder", self.integer, outer, m) + rest
                same = [self.applied("quotient", self.integer, *x) for x in ((whole, dm), (outer, m))]
                equal = z3.And(same[0] == same[1], self.applied("remainder", self.integer, whole, dm) == total)
                laws.append(z3.Implies(z3.And(d > 0, m > 0, whole == d * outer + rest), equal))
        return laws

    def look_up(self, index: Any, size: Any, element: Callable[[Any], Any]) -> Any:
        """Return the element at an index; outside of the size, an element that is never defined."""
        value = element(index)
        outside = z3.Const("outside", value.sort() if z3.is_expr(value) else self.element_sort)
        return self.choose(z3.And(index >= 0, index < size), value, outside)

    def element(self, number: Any) -> Any:
        """Return an integer as an element."""
        return z3.IntVal(number, self.context) if isinstance(number, int) else number

    def access(self, tensor: str, index: Index) -> Any:
        """Return an element of a variable, as a function of the parts of its index."""
        arguments = []
        for group, (number,) in index.items():
            number = z3.IntVal(number, self.context) if isinstance(number, int) else z3.simplify(number)
            arguments.append(number if group in self.signature.single else self.part(group, number))
        kind = kind_of(tensor)
        sort = {TRUTH: z3.BoolSort(self.context), INDEX: self.integer}.get(kind, self.element_sort)
        value = self.applied(f"tensor {tensor}", sort, *arguments) if arguments else z3.Const(f"tensor {tensor}", sort)
        if kind not in (TRUTH, INDEX):
            self.facts += [self.apply("least") <= value, value <= self.apply("greatest")]
        if tensor in self.signature.positive:
            self.facts.append(self.apply("constant", 0) < value)
        return value

    def unit(self, monoid: str) -> Any:
        """Return the neutral element of a monoid."""
        unit = MONOIDS[monoid].unit
        if unit is None:
            return z3.Const(f"unit of {monoid}", self.element_sort)
        return self.apply(unit) if isinstance(unit, str) else self.apply("constant", unit)

    def _summands(self, value: Any, monoid: str) -> tuple[Summand, ...]:
        if isinstance(value, Sums):
            if value.monoid == monoid:
                return value.summands
            value = self.single(value)
        if z3.is_expr(value) and value.eq(self.unit(monoid)):
            return ()
        return (Summand((), lambda j: value),)

    def summands(self, value: Any, monoid: str) -> tuple[Summand, ...]:
        """Return a value as summands of a monoid; the unit has none."""
        return self._summands(value, monoid)

    def single(self, value: Any) -> Any:
        """Return a value as an element: of sums, their totals."""
        if not isinstance(value, Sums):
            return value
        if self.signature.integers:
            raise OutOfReach(f"a function of a reduction with {value.monoid}")
        return self.totals.of(value)

    def reduce(self, monoid: str, boxes: Sequence[Box], body: Callable[[tuple[Vector, ...]], Any]) -> Any:
        """Return a reduction as summands, those of an inner reduction joined with it."""
        self._depth += 1
        with self.forgetting():  # a body is evaluated for its form here, and where indices are known again
            bounds = tuple(self.integer_symbol(f"bound {group} {self._depth}") for group, _ in boxes)
            inner = body(bounds)
            defined, always = self.defined(inner), self.truth(True)
            if not defined.eq(always):
                if self.signature.integers:
                    raise OutOfReach("a partial function inside of a reduction")
                sizes = self.lifted(tuple(n for _, (n,) in boxes))
                ranges = tuple((g, b, n) for (g, _), (b,), n in zip(boxes, bounds, sizes, strict=True))
                always = self.totals.define("logical_and", ranges, defined, always)
        self._depth -= 1
        if monoid == "add" and z3.is_add(inner):
            parts = (Summand(tuple(boxes), lambda j, k=k: body(j).arg(k)) for k in range(inner.num_args()))
            return Sums(monoid, tuple(parts), always)
        if not isinstance(inner, Sums):
            return Sums(monoid, (Summand(tuple(boxes), body),), always)
        first = len(boxes)
        return Sums(monoid, tuple(
            Summand((*boxes, *s.boxes), lambda j, k=k: self._summands(body(j[:first]), monoid)[k].body(j[first:]))
            for k, s in enumerate(self._summands(inner, monoid))
        ), always)  # fmt: skip

    def _distributed(self, name: str, values: tuple[Any, ...]) -> Any:
        """Apply a function to sums, where it distributes over them."""
        monoid = next(v.monoid for v in values if isinstance(v, Sums))
        defined = z3.And([self.defined(v) for v in values])
        if name == monoid and name not in GENERIC:
            return Sums(monoid, tuple(s for v in values for s in self._summands(v, monoid)), defined)
        if monoid == "add" and name == "sub":
            return self._distributed("add", (values[0], self.apply("neg", values[1])))
        linear = name in ("neg", "mul") or (name == "div" and not isinstance(values[1], Sums))
        if monoid != "add" or not linear:
            return self.apply(name, *map(self.single, values))
        if name == "div":
            defined = z3.And(defined, values[1] != 0)

        def joined(parts: tuple[Summand, ...]) -> Summand:
            def body(j: tuple[Vector, ...]) -> Any:
                elements = []
                for s in parts:
                    elements.append(s.body(j[: len(s.boxes)]))
                    j = j[len(s.boxes) :]
                return self.apply(name, *elements)

            return Summand(tuple(b for s in parts for b in s.boxes), body)

        return Sums("add", tuple(joined(p) for p in product(*(self._summands(v, "add") for v in values))), defined)

    def apply(self, name: str, *elements: Any) -> Any:
        """Return an elementwise function of elements."""
        if any(isinstance(e, Sums) for e in elements):
            if name == "select" and not isinstance(elements[0], Sums):
                return self.choose(*elements)
            return self._distributed(name, elements)
        if name == "constant":
            (value,) = elements
            if isinstance(value, bool):
                return z3.BoolVal(value, self.context)
            return z3.IntVal(value, self.context) if self.signature.integers else z3.RealVal(Fraction(str(value)), self.context)
        if name in ("least", "greatest"):
            return z3.Const(name, self.element_sort)
        if self.signature.integers and name in ("div", "exp", "log", "sqrt", "rsqrt", "pow"):
            raise Inexpressible(f"{name} of integers")
        if name in MEANINGS:
            return MEANINGS[name](self, *elements)
        return self.applied(f"any {name}", self.element_sort, *elements)

    def require(self, group: str, conditions: Vector) -> None:
        """Note a condition under which an operator is defined."""
        self.requirements.append((group, self.truth(conditions[0])))

    def defined(self, value: Any) -> Any:
        """Return the condition under which a value is defined, as it is evaluated: of a choice, what is chosen has to be."""
        if isinstance(value, Sums):
            return z3.simplify(value.defined)
        if not z3.is_expr(value) or not z3.is_app(value) or value.decl().name().startswith("tensor "):
            return self.truth(True)
        if value.decl().name() == "outside":
            return self.truth(False)
        if value.decl().name() in self.totals.named:
            return self.totals.named[value.decl().name()].defined
        if value.get_id() not in self._defined:
            arguments = value.children()
            conditions = [self.defined(a) for a in arguments]
            if value.decl().kind() == z3.Z3_OP_ITE:
                conditions = [conditions[0], z3.If(arguments[0], *conditions[1:])]
            name = partial_function(value)
            needed = {"div": POSITIVE, "log": POSITIVE, "sqrt": NONNEGATIVE}.get(name)
            if name and not (needed and self.totals.sign(arguments[-1]) >= needed):
                conditions.append(self.truth(PARTIAL[name](self, *arguments)))
            self._defined[value.get_id()] = value, z3.simplify(z3.And([*conditions, self.truth(True)]))
        return self._defined[value.get_id()][1]

    def note(self, name: str, value: Any) -> None:
        """Note the application of a function that has laws."""
        if not any(value.eq(v) for v in self._applied.setdefault(name, [])):
            self._applied[name].append(value)

    def shared(self, tensor: RankTensor) -> RankTensor:
        """Return a tensor that evaluates an element once."""
        known: dict[tuple[tuple[str, str], ...], Any] = {}

        def at(index: Index) -> Any:
            key = tuple((g, repr(k) if isinstance(k, int) else f"expression {k.sexpr()}") for g, (k,) in index.items())
            if key not in known:
                known[key] = tensor.at(index)
            return known[key]

        return RankTensor(tensor.sizes, at, tensor.order)

    def laws(self) -> list[Any]:
        """Return instances of the laws of functions that are not polynomial, for all applications so far."""
        laws: list[Any] = []
        for name, law in LAWS.items():
            for value in self._applied.get(name, ()):
                laws += law(self, value, *value.children())
        exponentials = self._applied.get("exp", ())
        for a, b in combinations(exponentials, 2):
            total = a.decl()(a.arg(0) + b.arg(0))
            laws += [total == a * b, z3.Implies(a.arg(0) == -b.arg(0), a * b == 1)]
            laws += [e == a * b for e in exponentials if z3.simplify(e.arg(0) - a.arg(0) - b.arg(0)).eq(self.apply("constant", 0))]
        for a in exponentials:
            laws += [z3.Implies(a.arg(0) == -b.arg(0), a * b == 1) for b in exponentials]
        return laws
