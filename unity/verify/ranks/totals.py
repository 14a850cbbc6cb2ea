"""Totals: reductions as opaque elements, with which more is computed than sums of products.

A total is a symbol with a definition: a monoid, boxes of indices, and a body at symbols that stand for these indices, its bounds.
Its normal form takes out of a sum what does not depend on the bounds; a condition on a bound is a smaller range; and sums of
products of independent factors are products of sums. So equal sums are one symbol. Definitions are kept for ever, and an expression
at other indices is the expression with the symbols that depend on them defined again (`Totals.instance`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import z3

from unity.verify.ranks.algebra import ONE, Algebra, AlgebraAtom, Monomial, Poly, plus, simplified
from unity.verify.ranks.forms import MONOIDS, TRUTH, OutOfReach
from unity.verify.ranks.operators import PARTIAL, Vector

if TYPE_CHECKING:
    from unity.verify.ranks.symbolic import Sums, SymbolicDomain

UNKNOWN, NONNEGATIVE, POSITIVE = 0, 1, 2
Range = tuple[str, Any, Any]  # a group, a bound, and the size that it is below


@dataclass(frozen=True)
class Total:
    """A reduction as an element.

    Attributes:
        symbol: of Z3.
        monoid: by which elements are combined.
        ranges: the bounds, and where they are.
        body: the element at the bounds.
        defined: the condition under which the reduction is defined.
        height: one more than the greatest of the totals in the body.
    """

    symbol: Any
    monoid: str
    ranges: tuple[Range, ...]
    body: Any
    defined: Any
    height: int


class Totals:
    """The totals of a rule, and the normal forms of elements."""

    def __init__(self, domain: SymbolicDomain) -> None:
        self.domain = domain
        self.algebra = Algebra(domain.context, self._normal, self._decided, lambda e: self.sign(e) == POSITIVE)
        self.named: dict[str, Total] = {}
        self.reduced: set[str] = set()  # names of totals that are their own normal form
        self.equal: dict[str, Poly] = {}  # reduced totals that were proved equal to others
        self._keys: dict[tuple[str, ...], Total] = {}
        self._ranges: tuple[Range, ...] = ()
        self._leaves: dict[int, tuple[Any, frozenset[str]]] = {}
        self._conditions: dict[tuple[str, str], bool | None] = {}

    def define(self, monoid: str, ranges: tuple[Range, ...], body: Any, defined: Any) -> Any:
        """Return the symbol of a total."""
        key = (monoid, _text(ranges), body.sexpr(), defined.sexpr())
        if key not in self._keys:
            sort = z3.BoolSort(self.domain.context) if MONOIDS[monoid].kind == TRUTH else self.domain.element_sort
            symbol = z3.Const(f"total {len(self._keys)}", sort)
            self._keys[key] = total = Total(symbol, monoid, ranges, body, defined, 1 + self._height(body))
            self.named[symbol.decl().name()] = total
            if monoid == "logical_and" and self.nonempty(ranges) and not self.leaves(body) & _names(ranges):
                self.domain.facts.append(z3.Implies(symbol, body))
            if MONOIDS[monoid].kind != TRUTH and self.sign(symbol):
                zero = self.domain.apply("constant", 0)
                self.domain.facts.append(symbol > zero if self.sign(symbol) == POSITIVE else symbol >= zero)
        return self._keys[key].symbol

    def of(self, sums: Sums) -> Any:
        """Return sums as an element: the combination of a total for each."""
        values = [self._of(s.boxes, s.body, sums) for s in sums.summands]
        if not values:
            values = [self.define(sums.monoid, (), self.domain.unit(sums.monoid), sums.defined)]
        result = values[0]
        for value in values[1:]:
            result = self.domain.apply(sums.monoid, result, value)
        return result

    def _of(self, boxes: Sequence[tuple[str, Vector]], body: Any, sums: Sums) -> Any:
        height = 1
        while True:
            ranges = self.ranges([(g, n) for g, (n,) in boxes], height)
            with self.domain.forgetting():
                element = body(tuple((bound,) for _, bound, _ in ranges))
            needed = 1 + self._height(element)
            if needed == height:
                return self.define(sums.monoid, ranges, element, sums.defined)
            height = needed

    def ranges(self, boxes: Sequence[tuple[str, Any]], height: int) -> tuple[Range, ...]:
        """Return bounds for boxes, by names that only depend on their place and the height."""
        sizes = self.domain.lifted(tuple(n for _, n in boxes))
        names = [f"each {g} {height}.{k}" for k, (g, _) in enumerate(boxes)]
        return tuple(
            (g, z3.Int(name, self.domain.context), simplified(n)) for (g, _), name, n in zip(boxes, names, sizes, strict=True)
        )

    def _height(self, e: Any) -> int:
        return max((self.named[n].height for n in constants(e) if n in self.named), default=0)

    def inside(self, ranges: Sequence[Range]) -> list[tuple[str, Any]]:
        """Return for each range its group, and the condition that the bound is in it."""
        return [(g, z3.And(bound >= 0, bound < n)) for g, bound, n in ranges]

    def nonempty(self, ranges: Sequence[Range]) -> bool:
        """Return whether boxes have an index for certain."""
        return all(self.domain.follows(g, n >= 1) for g, _, n in ranges)

    def leaves(self, e: Any) -> frozenset[str]:
        """Return the names of the symbols that an expression depends on, by definitions too."""
        if e.get_id() not in self._leaves:
            result: set[str] = set()
            for name in constants(e):
                total, definition = self.named.get(name), self.domain.definitions.get(name)
                if total:
                    result |= (self.leaves(total.body) | self.leaves(total.defined)) - _names(total.ranges)
                elif definition is not None:
                    result |= self.leaves(definition.meaning)
                else:
                    result.add(name)
            self._leaves[e.get_id()] = e, frozenset(result)
        return self._leaves[e.get_id()][1]

    def instance(self, e: Any, values: Mapping[str, Any]) -> Any:
        """Return an expression with integers in the place of symbols."""
        moved = [(z3.Int(name, self.domain.context), value) for name, value in values.items()]
        for name, symbol in constants(e).items():
            total, definition = self.named.get(name), self.domain.definitions.get(name)
            if total and self.leaves(symbol) & set(values):
                own = _names(total.ranges)
                inner = {n: v for n, v in values.items() if n not in own}
                if any(self.leaves(v) & own for v in inner.values()):
                    raise OutOfReach("an index would mean another one inside of a reduction")
                parts = self.instance(total.body, inner), self.instance(total.defined, inner)
                moved.append((symbol, self.define(total.monoid, total.ranges, *parts)))
            elif definition is not None:
                moved.append((symbol, self.domain.again(definition, self.instance(definition.meaning, values))))
        return substituted(e, *moved) if moved else e

    def _decided(self, condition: Any) -> bool | None:
        """Return whether a condition holds always or never within the ranges of the totals around it."""
        key = _text(self._ranges), condition.sexpr()
        if key not in self._conditions:
            definition = self.domain.definitions.get(condition.decl().name()) if not condition.children() else None
            group = definition.group if definition is not None else ""
            formula = definition.meaning if definition is not None else condition
            single = self.domain.signature.single
            within = z3.And([c for g, c in self.inside(self._ranges) if g == group or g in single] + [self.domain.truth(True)])
            result = None
            if not any(n.startswith("tensor ") for n in functions(formula)):
                if self.domain.follows(group, z3.Implies(within, formula)):
                    result = True
                elif not group or group in self.domain.signature.nonempty:
                    result = False if self.domain.follows(group, z3.Implies(within, z3.Not(formula))) else None
            self._conditions[key] = result
        return self._conditions[key]

    def _normal(self, e: Any) -> Poly | None:
        name = e.decl().name()
        if name not in self.named:
            return None
        return self.symbol(name) if name in self.reduced else self._reduced(self.named[name])

    def symbol(self, name: str) -> Poly:
        """Return the normal form of a total that is its own."""
        if name in self.equal:
            return self.equal[name]
        symbol = self.named[name].symbol
        return self.algebra.atom(symbol.sexpr(), AlgebraAtom("element", symbol))

    def _normal_within(self, ranges: tuple[Range, ...], e: Any) -> Poly:
        """Return the normal form of a body within its ranges."""
        outer, scope = self._ranges, self.algebra.scope
        self._ranges = (*outer, *ranges)
        self.algebra.scope = _text(self._ranges)
        try:
            return self.algebra.normal(e)
        finally:
            self._ranges, self.algebra.scope = outer, scope

    def _reduced(self, total: Total) -> Poly:
        """Return the normal form of a total."""
        if not total.ranges:
            return self.algebra.normal(total.body)
        body = self._normal_within(total.ranges, total.body)
        if total.monoid == "add":
            return plus(*(self._sum_of(m, c, total.ranges) for m, c in body.items()))
        if total.monoid == "max" and self.nonempty(total.ranges):
            free = {m: c for m, c in body.items() if not self._bounds_in(m, total.ranges)}
            rest = {m: c for m, c in body.items() if m not in free}
            return plus(free, self._canonical("max", total.ranges, rest)) if rest else free
        return self._canonical(total.monoid, total.ranges, body)

    def _bounds_in(self, m: Monomial, ranges: Sequence[Range]) -> set[str]:
        names = _names(ranges)
        return {n for e in self.algebra.terms({m: Fraction(1)}) for n in self.leaves(e) & names}

    def _sum_of(self, m: Monomial, c: Fraction, ranges: tuple[Range, ...]) -> Poly:
        """Return the sum of a monomial: a product of sums of the factors that depend on the same bounds.

        A condition on a bound, as joined tensors have, is a smaller range; of an equation, only one term is left. A reciprocal,
        a root or a logarithm of a total stays inside unless it is evaluated for certain: over nothing, `sum(x / sum(x))` is 0,
        not `sum(x) / sum(x)`.
        """
        for r in ranges:
            for name, _ in m.powers:
                restriction = self._restriction(self.algebra.atoms[name], r, ranges)
                if restriction:
                    rest = Monomial(tuple(p for p in m.powers if p[0] != name), m.exponent)
                    return self._restricted(rest, c, ranges, r, *restriction)
            if self._follows(r[0], r[2] == 1):
                return self._restricted(m, c, ranges, r, "first", z3.IntVal(0, self.domain.context))
        powers = [self.algebra.atoms[name].kind for name, _ in m.powers if self._bounds_in(Monomial(((name, 1),)), ranges)]
        evaluated = "indicator" not in powers and self.nonempty(ranges)
        factors = [Monomial((p,)) for p in m.powers] + [Monomial((), (t,)) for t in m.exponent]
        result: Poly = {ONE: c}
        parts: list[tuple[set[str], list[Monomial]]] = [({b.decl().name()}, []) for _, b, _ in ranges]
        for factor in factors:
            bounds = self._bounds_in(factor, ranges)
            if not evaluated and self._partial(factor):
                bounds = _names(ranges)
            if not bounds:
                result = self.algebra.times(result, {factor: Fraction(1)})
                continue
            joined = [p for p in parts if p[0] & bounds]
            parts = [p for p in parts if not p[0] & bounds]
            parts.append((set().union(*(p[0] for p in joined)), [f for p in joined for f in p[1]] + [factor]))
        for bounds, own in parts:
            body: Poly = {ONE: Fraction(1)}
            for factor in own:
                body = self.algebra.times(body, {factor: Fraction(1)})
            box = tuple(r for r in ranges if r[1].decl().name() in bounds)
            result = self.algebra.times(result, self._canonical("add", box, body))
        return result

    def _partial(self, factor: Monomial) -> bool:
        """Return whether a factor may be undefined because of the value of a total."""
        return any(partial_function(e) and self.totals_in(e) for e in nodes(self.algebra.expression({factor: Fraction(1)})))

    def _follows(self, group: str, condition: Any) -> bool:
        """Return whether a condition holds at any dimension of a group, within the ranges of the totals around it."""
        known = [c for g, c in self.inside(self._ranges) if g == group or g in self.domain.signature.single]
        return self.domain.follows(group, z3.Implies(z3.And([*known, self.domain.truth(True)]), condition))

    def _restriction(self, atom: AlgebraAtom, r: Range, ranges: Sequence[Range]) -> tuple[str, Any] | None:
        """Return the part of a range where an indicator is 1: from an integer, below it, or one integer alone."""
        group, bound, size = r
        if atom.kind != "indicator" or group not in self.domain.signature.single:
            return None
        solved = solve(atom.term, bound)
        if solved is None or self.leaves(solved[1]) & _names(ranges):
            return None
        if solved[0] != "one" and not self._follows(group, z3.And(solved[1] >= 0, solved[1] <= size)):
            return None
        return solved

    def _restricted(self, m: Monomial, c: Fraction, ranges: tuple[Range, ...], r: Range, kind: str, limit: Any) -> Poly:
        """Return the sum of a monomial over a part of a range."""
        group, bound, size = r
        body, name = self.algebra.expression({m: c}), bound.decl().name()
        factor: Poly = {ONE: Fraction(1)}
        part: tuple[Range, ...] = ()
        if kind in ("one", "first"):
            body = self.instance(body, {name: limit})
        if kind == "one":
            factor = self.algebra.indicator(z3.And(limit >= 0, limit < size))[0]
        if kind == "from":
            body = self.instance(body, {name: bound + limit})
            part = ((group, bound, simplified(size - limit)),)
        if kind == "below":
            part = ((group, bound, simplified(limit)),)
        k = ranges.index(r)
        remaining = (*ranges[:k], *part, *ranges[k + 1 :])
        terms = self._normal_within(remaining, body) if remaining else self.algebra.normal(body)
        if remaining:
            terms = plus(*(self._sum_of(n, d, remaining) for n, d in terms.items()))
        return self.algebra.times(factor, terms)

    def _canonical(self, monoid: str, ranges: tuple[Range, ...], body: Poly) -> Poly:
        """Return the symbol of a total whose body is in normal form, by bounds of canonical names."""
        e = self.algebra.expression(body)
        order = sorted(ranges, key=lambda r: (r[0], r[2].sexpr()))
        renamed = self.ranges([(g, n) for g, _, n in order], 1 + self._height(e))
        if [r[1] for r in renamed] != [r[1] for r in ranges]:
            moved = {old.decl().name(): new for (_, old, _), (_, new, _) in zip(order, renamed, strict=True)}
            with self.domain.forgetting():
                e = self.instance(e, moved)
            e = self.algebra.expression(self._normal_within(renamed, e))
        name = self.define(monoid, renamed, e, self.domain.truth(True)).decl().name()
        self.reduced.add(name)
        return self.symbol(name)

    def totals_in(self, e: Any) -> set[str]:
        """Return the names of the totals in an expression, and in their bodies."""
        own = {n for n in constants(e) if n in self.named}
        return own.union(*(self.totals_in(self.named[n].body) for n in own))

    def at(self, total: Total, index: Sequence[Any]) -> Any:
        """Return the body of a total at an index."""
        return self.instance(total.body, {b.decl().name(): k for (_, b, _), k in zip(total.ranges, index, strict=True)})

    def sign(self, e: Any) -> int:
        """Return whether an element, where it is defined, is positive or not negative for certain."""
        kind, arguments = e.decl().kind(), e.children()
        if z3.is_rational_value(e):
            return POSITIVE if e.as_fraction() > 0 else NONNEGATIVE if e.as_fraction() == 0 else UNKNOWN
        if kind == z3.Z3_OP_ADD:
            signs = [self.sign(a) for a in arguments]
            return max(signs) if min(signs) else UNKNOWN
        if kind == z3.Z3_OP_MUL:
            odd = [a for a in arguments if sum(a.eq(b) for b in arguments) % 2]
            even = POSITIVE if len(odd) == len(arguments) else NONNEGATIVE
            return min([self.sign(a) for a in odd] + [even])
        if kind == z3.Z3_OP_DIV:
            return self.sign(arguments[0]) if self.sign(arguments[1]) == POSITIVE else UNKNOWN
        if kind == z3.Z3_OP_ITE:
            return min(self.sign(a) for a in arguments[1:])
        name = e.decl().name()
        if name == "exp":
            return POSITIVE
        if name == "sqrt":
            return max(NONNEGATIVE, self.sign(arguments[0]))
        if name.startswith("tensor ") and name.removeprefix("tensor ") in self.domain.signature.positive:
            return POSITIVE
        total = self.named.get(name)
        if total is None or total.monoid not in ("add", "max"):
            return UNKNOWN
        least = self.sign(total.body)
        if total.monoid == "max" or least == POSITIVE:
            return least if self.nonempty(total.ranges) else NONNEGATIVE if total.monoid == "add" else UNKNOWN
        return least


def _text(ranges: Sequence[Range]) -> str:
    return "; ".join(f"{group} {bound.sexpr()} {size.sexpr()}" for group, bound, size in ranges)


def _names(ranges: Sequence[Range]) -> set[str]:
    return {bound.decl().name() for _, bound, _ in ranges}


def solve(condition: Any, bound: Any) -> tuple[str, Any] | None:
    """Solve a comparison of integers for a symbol: "from" an integer, "below" it, or "one" alone."""
    opposite = z3.is_not(condition)
    if opposite:
        condition = condition.arg(0)
    if not (z3.is_le(condition) or z3.is_ge(condition) or z3.is_eq(condition)) or not z3.is_int(condition.arg(0)):
        return None
    difference = condition.arg(0) - condition.arg(1)
    at_zero, at_one = (simplified(substituted(difference, (bound, z3.IntVal(k, bound.ctx)))) for k in (0, 1))
    slope = simplified(at_one - at_zero)
    linear: Any = z3.simplify(difference - at_zero - slope * bound, som=True)
    if not z3.is_int_value(slope) or abs(slope.as_long()) != 1 or not (z3.is_int_value(linear) and linear.as_long() == 0):
        return None
    rising = slope.as_long() == 1
    limit = -at_zero if rising else at_zero
    if z3.is_eq(condition):
        return None if opposite else ("one", simplified(limit))
    if z3.is_ge(condition) == rising:  # bound >= limit
        return "below" if opposite else "from", simplified(limit)
    return ("from", simplified(limit + 1)) if opposite else ("below", simplified(limit + 1))


def substituted(e: Any, *pairs: tuple[Any, Any]) -> Any:
    """Return an expression with others in the place of symbols."""
    return z3.substitute(e, *pairs)


def partial_function(e: Any) -> str:
    """Return the name of the function that an expression applies, if it is not defined everywhere; otherwise an empty text."""
    name = e.decl().name() if z3.is_app(e) else ""
    name = "div" if name == "/" else name
    return name if name in PARTIAL else ""


def constants(e: Any) -> dict[str, Any]:
    """Return the constants in an expression by name."""
    return {s.decl().name(): s for s in nodes(e) if z3.is_const(s) and s.decl().kind() == z3.Z3_OP_UNINTERPRETED}


def functions(e: Any) -> set[str]:
    """Return the names of the unknown functions and constants in an expression."""
    return {s.decl().name() for s in nodes(e) if s.decl().kind() == z3.Z3_OP_UNINTERPRETED}


def nodes(e: Any) -> Iterator[Any]:
    """Yield the parts of an expression, each once."""
    seen, waiting = set(), [e]
    while waiting:
        s = waiting.pop()
        if s.get_id() not in seen:
            seen.add(s.get_id())
            yield s
            waiting += s.children()
