"""Normal forms of real expressions: sums of monomials in opaque elements, with exponentials and reciprocals.

An expression becomes a Laurent polynomial. Exponentials are kept apart from other factors, as the polynomial in the exponent, so
that `exp(x - m)` is `exp(x)` times `exp(-m)` by addition of exponents. A choice is a sum of its two values, each times an
*indicator* of its condition, which is 1 where it holds and 0 elsewhere. The reciprocal of a polynomial of several terms is an
opaque factor, whose common monomial is taken out.

If two normal forms are equal, the expressions are equal wherever every divisor that is evaluated is nonzero and every argument of a
root or of a logarithm is in its domain. That is where the expressions are defined, so nothing is claimed elsewhere. A reciprocal
from a branch that is not chosen has an indicator 0 as its factor; `Algebra.vanishes` therefore fixes the indicators first, and
clears denominators behind that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import gcd, lcm
from typing import Any, NamedTuple

import z3

from unity.verify.ranks.forms import OutOfReach

LARGEST = 400  # terms of a polynomial
CASES = 6  # indicators of an equation


class Monomial(NamedTuple):
    """Powers of atoms, by name, and the terms of the exponent of an exponential."""

    powers: tuple[tuple[str, int], ...] = ()
    exponent: tuple[tuple[Monomial, Fraction], ...] = ()


Poly = dict[Monomial, Fraction]
ONE = Monomial()


@dataclass(frozen=True)
class AlgebraAtom:
    """An opaque factor.

    Attributes:
        kind: "element", "indicator", "root", "logarithm" or "divisor".
        term: the element, the condition, or the function's value, for Z3.
        inside: the argument of a root or a logarithm; a divisor's polynomial.
        opposite: the name of the indicator of the opposite condition.
    """

    kind: str
    term: Any
    inside: Poly | None = None
    opposite: str = ""


def simplified(e: Any) -> Any:
    """Return a simpler expression."""
    return z3.simplify(e)


def constant(number: Fraction | int) -> Poly:
    """Return a constant polynomial."""
    return {ONE: Fraction(number)} if number else {}


def plus(*polys: Poly) -> Poly:
    """Return a sum."""
    total: Poly = {}
    for p in polys:
        for m, c in p.items():
            total[m] = total.get(m, Fraction(0)) + c
    return {m: c for m, c in total.items() if c}


def scaled(p: Poly, factor: Fraction | int) -> Poly:
    """Return a multiple."""
    return {m: c * factor for m, c in p.items()} if factor else {}


def written(p: Poly) -> tuple[tuple[Monomial, Fraction], ...]:
    """Return the terms in a fixed order."""
    return tuple(sorted(p.items(), key=repr))


class Algebra:
    """Computes normal forms of Z3's expressions.

    Args:
        context: of Z3.
        opaque: the normal form of an element with a definition, such as a sum; None of others.
        decide: whether a condition holds always, never, or (None) neither.
        positive: whether an element is positive for certain.
    """

    def __init__(
        self,
        context: Any,
        opaque: Callable[[Any], Poly | None],
        decide: Callable[[Any], bool | None],
        positive: Callable[[Any], bool],
    ) -> None:
        self.context, self.opaque, self.decide, self.positive = context, opaque, decide, positive
        self.atoms: dict[str, AlgebraAtom] = {}
        self.scope = ""  # of indices, on which decisions depend
        self._normal: dict[tuple[str, int], tuple[Any, Poly]] = {}

    def forget(self) -> None:
        """Discard cached normal forms, after facts about elements or conditions have changed."""
        self._normal.clear()

    def atom(self, name: str, atom: AlgebraAtom) -> Poly:
        """Return an opaque factor as a polynomial."""
        self.atoms.setdefault(name, atom)
        return {Monomial(((name, 1),)): Fraction(1)}

    def normal(self, e: Any) -> Poly:
        """Return the normal form of a real expression."""
        key = self.scope, e.get_id()
        if key not in self._normal:
            self._normal[key] = e, self._merged(self._computed(e))
        return self._normal[key][1]

    def _computed(self, e: Any) -> Poly:
        kind = e.decl().kind()
        if z3.is_rational_value(e) or z3.is_int_value(e):
            return constant(e.as_fraction() if z3.is_rational_value(e) else e.as_long())
        arguments = e.children()
        if kind == z3.Z3_OP_ADD:
            return plus(*map(self.normal, arguments))
        if kind == z3.Z3_OP_SUB:
            return plus(self.normal(arguments[0]), *(scaled(self.normal(a), -1) for a in arguments[1:]))
        if kind == z3.Z3_OP_UMINUS:
            return scaled(self.normal(arguments[0]), -1)
        if kind == z3.Z3_OP_MUL:
            total = constant(1)
            for a in arguments:
                total = self.times(total, self.normal(a))
            return total
        if kind == z3.Z3_OP_DIV:
            return self.times(self.normal(arguments[0]), self.reciprocal(self.normal(arguments[1])))
        if kind == z3.Z3_OP_ITE:
            yes, no = self.normal(arguments[1]), self.normal(arguments[2])
            if yes == no:
                return yes
            holds = self.indicator(arguments[0])
            return plus(self.times(holds[0], yes), self.times(holds[1], no))
        name = e.decl().name()
        if name in ("exp", "log", "sqrt"):
            return {"exp": self.exponential, "log": self.logarithm, "sqrt": self.root}[name](self.normal(arguments[0]))
        known = self.opaque(e)
        if known is not None:
            return known
        if name.startswith("any ") and arguments:
            return self._lifted([self.normal(a) for a in arguments], lambda *p: self._function(e.decl(), p))
        e = simplified(e)
        return self.atom(e.sexpr(), AlgebraAtom("element", e))

    def _function(self, declaration: Any, arguments: tuple[Poly, ...]) -> Poly:
        value = declaration(*map(self.expression, arguments))
        return self.atom(repr((declaration.name(), *map(written, arguments))), AlgebraAtom("element", value))

    def indicator(self, condition: Any) -> tuple[Poly, Poly]:
        """Return the indicators of a condition and of its opposite."""
        condition = simplified(condition)
        if z3.is_true(condition) or z3.is_false(condition):
            return constant(int(z3.is_true(condition))), constant(int(z3.is_false(condition)))
        if z3.is_not(condition):
            no, yes = self.indicator(condition.arg(0))
            return yes, no
        if z3.is_and(condition):
            holds, fails = constant(1), constant(0)
            for c in condition.children():  # each term of either side has the indicators of its branch
                yes, no = self.indicator(c)
                holds, fails = self.times(holds, yes), plus(fails, self.times(holds, no))
            return holds, fails
        decided = self.decide(condition)
        if decided is not None:
            return constant(int(decided)), constant(int(not decided))
        names = f"if {condition.sexpr()}", f"unless {condition.sexpr()}"
        yes = self.atom(names[0], AlgebraAtom("indicator", condition, opposite=names[1]))
        return yes, self.atom(names[1], AlgebraAtom("indicator", z3.Not(condition), opposite=names[0]))

    def times(self, a: Poly, b: Poly) -> Poly:
        """Return a product."""
        if len(a) * len(b) > LARGEST:
            raise OutOfReach("normal forms are too long")
        return plus(*(scaled(self._product(m, n), c * d) for m, c in a.items() for n, d in b.items()))

    def _product(self, m: Monomial, n: Monomial) -> Poly:
        powers = dict(m.powers)
        for name, k in n.powers:
            powers[name] = powers.get(name, 0) + k
        exponent = written(plus(dict(m.exponent), dict(n.exponent))) if m.exponent and n.exponent else m.exponent or n.exponent
        factors = []
        for name, k in list(powers.items()):
            atom = self.atoms[name]
            if atom.kind == "indicator" and k:
                powers[name] = 1
                if atom.opposite in powers:
                    return {}
            elif atom.kind == "root" and abs(k) > 1:
                powers[name] = k - 2 * int(k / 2)
                factors += [atom.inside if k > 0 else self.reciprocal(atom.inside or {})] * (abs(k) // 2)
            elif atom.kind == "divisor" and k > 0:
                del powers[name]
                factors += [atom.inside] * k
        result = {Monomial(tuple(sorted((n, k) for n, k in powers.items() if k)), exponent): Fraction(1)}
        for f in factors:
            result = self.times(result, f or {})
        return result

    def _indicators(self, *polys: Poly) -> set[str]:
        return {n for p in polys for m in p for n, _ in m.powers if self.atoms[n].kind == "indicator"}

    def fixed(self, p: Poly, name: str, value: int) -> Poly:
        """Return a polynomial where an indicator is 1, or where it is 0."""
        opposite = self.atoms[name].opposite
        zero, one = (opposite, name) if value else (name, opposite)
        return plus(*(
            {Monomial(tuple(x for x in m.powers if x[0] != one), m.exponent): c}
            for m, c in p.items() if all(n != zero for n, _ in m.powers)
        ))  # fmt: skip

    def _lifted(self, arguments: list[Poly], function: Callable[..., Poly]) -> Poly:
        """Apply a function to polynomials by the cases of their indicators."""
        for name in sorted(self._indicators(*arguments)):
            cases = [self._lifted([self.fixed(p, name, value) for p in arguments], function) for value in (1, 0)]
            if cases[0] == cases[1]:
                return cases[0]
            names = name, self.atoms[name].opposite
            return plus(*(self.times({Monomial(((n, 1),)): Fraction(1)}, p) for n, p in zip(names, cases, strict=True)))
        return function(*arguments)

    def _merged(self, p: Poly) -> Poly:
        """Join terms that differ only in an indicator and its opposite."""
        if len(p) > LARGEST:
            raise OutOfReach("normal forms are too long")
        for m, c in p.items():
            for name, _ in m.powers:
                opposite = self.atoms[name].opposite
                rest = tuple(x for x in m.powers if x[0] != name)
                other = Monomial(tuple(sorted((*rest, (opposite, 1)))), m.exponent)
                if opposite and p.get(other) == c:
                    remaining = {k: v for k, v in p.items() if k not in (m, other)}
                    return self._merged(plus(remaining, {Monomial(rest, m.exponent): c}))
        return p

    def exponential(self, p: Poly) -> Poly:
        """Return the exponential of a polynomial; a logarithm in the exponent becomes its argument."""
        return self._lifted([p], self._exponential)

    def _exponential(self, p: Poly) -> Poly:
        result, rest = constant(1), {}
        for m, c in p.items():
            atom = self.atoms[m.powers[0][0]] if len(m.powers) == 1 and m.powers[0][1] == 1 and not m.exponent else None
            if atom is not None and atom.kind == "logarithm" and c.denominator == 1 and abs(c) <= 3:
                factor = atom.inside if c > 0 else self.reciprocal(atom.inside or {})
                for _ in range(abs(int(c))):
                    result = self.times(result, factor or {})
            else:
                rest[m] = c
        return self.times(result, {Monomial((), written(rest)): Fraction(1)})

    def _split(self, p: Poly) -> tuple[Monomial, Fraction, Poly]:
        """Return the common monomial and the common number of a polynomial's terms, and the rest."""
        names = {n for m in p for n, _ in m.powers}
        powers = {n: min(dict(m.powers).get(n, 0) for m in p) for n in names}
        exponents = {n for m in p for n, _ in m.exponent}
        common = {n: min(dict(m.exponent).get(n, Fraction(0)) for m in p) for n in exponents}
        monomial = Monomial(tuple(sorted((n, k) for n, k in powers.items() if k)), written({n: c for n, c in common.items() if c}))
        rest = plus(*(scaled(self._without(m, powers, common), c) for m, c in p.items()))
        if not rest:  # the terms cancel once squares of roots are replaced
            return ONE, Fraction(1), rest
        number = Fraction(gcd(*(c.numerator for c in rest.values())), lcm(*(c.denominator for c in rest.values())))
        if written(rest)[0][1] < 0:
            number = -number
        return monomial, number, scaled(rest, 1 / number)

    def _without(self, m: Monomial, powers: dict[str, int], exponent: Poly) -> Poly:
        """Return a monomial over another, whose powers are subtracted before any is replaced."""
        names = {**dict(m.powers), **powers}
        left = tuple((n, dict(m.powers).get(n, 0) - powers.get(n, 0)) for n in names)
        return self._product(Monomial(left, written(plus(dict(m.exponent), scaled(exponent, -1)))), ONE)

    def _inverse(self, m: Monomial) -> Poly:
        return self._without(ONE, dict(m.powers), dict(m.exponent))

    def reciprocal(self, p: Poly) -> Poly:
        """Return the reciprocal of a polynomial."""
        return self._lifted([p], self._reciprocal)

    def _reciprocal(self, p: Poly) -> Poly:
        monomial, number, rest = self._split(p)
        if not rest:
            return self.atom("1/0", AlgebraAtom("element", z3.Real("1/0", self.context)))
        inverse = scaled(self._inverse(monomial), 1 / number)
        if rest == constant(1):
            return inverse
        name = f"divisor {written(rest)!r}"
        self.atom(name, AlgebraAtom("divisor", self.expression(rest), rest))
        return self.times(inverse, {Monomial(((name, -1),)): Fraction(1)})

    def logarithm(self, p: Poly) -> Poly:
        """Return the logarithm of a polynomial, with exponentials and odd powers of one atom taken out of it."""
        return self._lifted([p], self._logarithm)

    def _logarithm(self, p: Poly) -> Poly:
        monomial, number, rest = self._split(p)
        if not rest:
            return self._function(self._unary("log"), (rest,))
        outside = dict(monomial.exponent)
        inner = scaled(self.times({Monomial(monomial.powers): Fraction(1)}, rest), number)
        if inner == constant(1):
            return outside
        power = 1
        if len(inner) == 1 and number == 1 and len(monomial.powers) == 1 and rest == constant(1) and monomial.powers[0][1] % 2:
            name, power = monomial.powers[0]
            atom = self.atoms[name]
            inner = atom.inside if atom.kind == "divisor" and atom.inside else {Monomial(((name, 1),)): Fraction(1)}
        value = self.atom(f"log {written(inner)!r}", AlgebraAtom("logarithm", self._unary("log")(self.expression(inner)), inner))
        return plus(outside, scaled(value, power))

    def root(self, p: Poly) -> Poly:
        """Return the square root of a polynomial, with exponentials and even powers of positive atoms taken out of it."""
        return self._lifted([p], self._root)

    def _root(self, p: Poly) -> Poly:
        monomial, number, rest = self._split(p)
        if not rest:
            return {}
        even = {n for n, k in monomial.powers if k % 2 == 0 and self.positive(self.atoms[n].term)}
        half = tuple((n, k // 2) for n, k in monomial.powers if n in even)
        outside = {Monomial(half, tuple((n, c / 2) for n, c in monomial.exponent)): Fraction(1)}
        powers = tuple((n, k) for n, k in monomial.powers if n not in even)
        inner = scaled(self.times({Monomial(powers): Fraction(1)}, rest), number)
        if inner == constant(1):
            return outside
        value = self.atom(f"root {written(inner)!r}", AlgebraAtom("root", self._unary("sqrt")(self.expression(inner)), inner))
        return self.times(outside, value)

    def _unary(self, name: str) -> Any:
        real = z3.RealSort(self.context)
        return z3.Function(name, real, real)

    def expression(self, p: Poly) -> Any:
        """Return a polynomial as an expression of Z3."""
        terms = [self._term(m, c) for m, c in written(p)]
        return z3.Sum(terms) if len(terms) > 1 else terms[0] if terms else z3.RealVal(0, self.context)

    def _term(self, m: Monomial, c: Fraction) -> Any:
        value = z3.RealVal(c, self.context)
        parts = [value] if c != 1 or not (m.powers or m.exponent) else []
        for name, k in m.powers:
            atom = self.atoms[name]
            term = self._one_where(atom.term) if atom.kind == "indicator" else atom.term
            parts += [term if k > 0 else 1 / term] * abs(k)
        if m.exponent:
            parts.append(self._unary("exp")(self.expression(dict(m.exponent))))
        return parts[0] if len(parts) == 1 else z3.Product(parts)

    def _one_where(self, condition: Any) -> Any:
        """Return 1 where a condition holds, and 0 elsewhere."""
        return z3.If(condition, z3.RealVal(1, self.context), z3.RealVal(0, self.context))

    def terms(self, p: Poly) -> Iterator[Any]:
        """Yield the terms of a polynomial's atoms, those in exponents too."""
        for m in p:
            yield from (self.atoms[n].term for n, _ in m.powers)
            yield from self.terms(dict(m.exponent))

    def vanishes(self, p: Poly, impossible: Callable[[list[Any]], bool]) -> bool:
        """Return whether a polynomial is zero, in every case of its indicators, wherever its divisors are not.

        Args:
            p: the polynomial.
            impossible: whether conditions contradict the known facts.
        """
        names: list[str] = []
        for name in sorted(self._indicators(p)):
            if self.atoms[name].opposite not in names:
                names.append(name)
        if len(names) > CASES:
            return False
        for values in product((1, 0), repeat=len(names)):
            rest = p
            for name, value in zip(names, values, strict=True):
                rest = self.fixed(rest, name, value)
            rest, divisors = self._cleared(rest)
            if rest:
                conditions = [self.atoms[n].term if v else z3.Not(self.atoms[n].term) for n, v in zip(names, values, strict=True)]
                differs = self.expression(rest) != 0
                zeros = [self.atoms[n].term == 0 for n in divisors]
                if not impossible(conditions) and not all(impossible([*conditions, c]) for c in (differs, *zeros)):
                    return False
        return True

    def _cleared(self, p: Poly) -> tuple[Poly, set[str]]:
        """Return a polynomial without divisors, by multiplication with them, and their names."""
        divisors = set()
        while True:
            name = next((n for m in p for n, k in m.powers if self.atoms[n].kind == "divisor" and k < 0), "")
            if not name:
                return p, divisors
            divisors.add(name)
            most = max(-dict(m.powers).get(name, 0) for m in p)
            inside, total = self.atoms[name].inside or {}, {}
            for m, c in p.items():
                k = dict(m.powers).get(name, 0)
                factor: Poly = {Monomial(tuple(x for x in m.powers if x[0] != name), m.exponent): c}
                for _ in range(most + k):
                    factor = self.times(factor, inside)
                total = plus(total, factor)
            p = total
