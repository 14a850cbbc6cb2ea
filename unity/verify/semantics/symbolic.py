"""Polynomials over symbols as elements, so that an interpretation is a proof.

An array holds indices into a table of polynomials. Equal polynomials have equal indices, so arrays are compared as integers.
Coefficients are exact rationals. An operation outside of the ring (`exp(p)`, `1 / p`, `max(p, q)`) makes an *atom*, identified by
its name and its argument polynomials, and treated as one more symbol. This canonical form decides every identity of commutative
rings with uninterpreted functions, except for products that are too long to multiply out: these are atoms too, equal if their
factors are, and compared by numbers otherwise. A maximum is a set of arguments: associative, commutative and idempotent.

Measured: (x·y)·w = x·(y·w), 6x6, takes 10 ms; Z3 takes 18 ms to build both sides and 4 ms to simplify them. The table makes the
difference: polynomials that other devices, or other choices of the same operator, compute again are looked up, and comparing two
arrays is one line of numpy. Z3 is needed only where two canonical forms differ and no numbers distinguish them
(`polynomial_equality`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from unity.verify.semantics.domains import Array, ElementDomain

Number = int | Fraction
PRODUCT = "product"  # the atom of a product that is not multiplied out
BUDGET = 1_000_000  # products of terms, some seconds' worth, between two calls of `renew`
LONG = 100_000  # a product of more terms is not multiplied out
COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}


class PolynomialsTooLarge(Exception):
    """Polynomials have too many terms: smaller tensors prove as much."""


@dataclass(frozen=True)
class Atom:
    """A symbol without arguments, or a function of polynomials, which are given by their indices."""

    name: str
    arguments: tuple[int, ...] = ()
    symbol: bool = False


class Symbolic(ElementDomain):
    """Polynomials over atoms, in a table that only grows. An element is the index of a polynomial."""

    dtype = np.dtype(np.int64)
    decides = False

    def __init__(self, budget: int = BUDGET, long: int = LONG) -> None:
        self.budget, self.long, self.work = budget, long, 0
        self.atoms: list[Atom] = []
        self.atom_ids: dict[Atom, int] = {}
        self.monomials: list[tuple[int, ...]] = [()]  # sorted atoms, repeated for powers; monomial 0 is 1
        self.monomial_ids: dict[tuple[int, ...], int] = {(): 0}
        self.polynomials: list[dict[int, Number]] = []
        self.ids: dict[frozenset, int] = {}
        self.products: dict[tuple[int, int], int] = {}
        self.monomial_products: dict[tuple[int, int], int] = {}
        self.zero, self.one = self.intern({}), self.intern({0: 1})
        self.nan, self.inf = self.atom(Atom("nan")), self.atom(Atom("inf"))
        self.minus_inf = self._scale(self.inf, -1)

    def spend(self, terms: int) -> None:
        """Count work. Raises PolynomialsTooLarge beyond the budget."""
        self.work += terms
        if self.work > self.budget:
            raise PolynomialsTooLarge

    def renew(self) -> None:
        """Start a new budget of work. The table stays."""
        self.work = 0

    # The table

    def intern(self, terms: dict[int, Number]) -> int:
        """Return the index of a polynomial, given by its nonzero coefficients."""
        key = frozenset(terms.items())
        index = self.ids.get(key)
        if index is None:
            index = self.ids[key] = len(self.polynomials)
            self.polynomials.append(terms)
        return index

    def atom(self, atom: Atom) -> int:
        """Return the polynomial that is one atom."""
        index = self.atom_ids.get(atom)
        if index is None:
            index = self.atom_ids[atom] = len(self.atoms)
            self.atoms.append(atom)
        return self.intern({self._monomial((index,)): 1})

    def _monomial(self, atoms: tuple[int, ...]) -> int:
        index = self.monomial_ids.get(atoms)
        if index is None:
            index = self.monomial_ids[atoms] = len(self.monomials)
            self.monomials.append(atoms)
        return index

    def number(self, value: Number) -> int:
        """Return the constant polynomial of a number."""
        return self.intern({0: value}) if value else self.zero

    def value_of(self, x: int) -> Number | None:
        """Return the number that a constant polynomial is, None for others."""
        terms = self.polynomials[x]
        return 0 if not terms else terms.get(0) if len(terms) == 1 else None

    def only_atom(self, x: int) -> Atom | None:
        """Return the atom that a polynomial is, None for others."""
        terms = self.polynomials[x]
        if len(terms) != 1:
            return None
        ((m, c),) = terms.items()
        return self.atoms[self.monomials[m][0]] if c == 1 and len(self.monomials[m]) == 1 else None

    def symbols(self, name: str, shape: Sequence[int]) -> Array:
        """Return fresh symbols `name[0,1]`, one for each element."""
        cells = itertools.product(*(range(n) for n in shape))
        ids = [self.atom(Atom(f"{name}[{','.join(map(str, cell))}]", symbol=True)) for cell in cells]
        return np.asarray(ids, np.int64).reshape(tuple(shape))

    # Arithmetic on indices of polynomials. Whatever meets NaN is NaN.

    def _sum(self, parts: Sequence[int]) -> int:
        result: dict[int, Number] = {}
        for part in parts:
            if part == self.nan:
                return self.nan
            self.spend(len(self.polynomials[part]))
            for m, c in self.polynomials[part].items():
                result[m] = result.get(m, 0) + c
        return self.intern({m: c for m, c in result.items() if c})

    def _add(self, x: int, y: int) -> int:
        if x == self.zero or y == self.zero:
            return x + y - self.zero
        return self._sum((x, y))

    def _scale(self, x: int, factor: Number) -> int:
        if x == self.nan:
            return x
        return self.intern({m: c * factor for m, c in self.polynomials[x].items()}) if factor else self.zero

    def _mul(self, x: int, y: int) -> int:
        if self.nan in (x, y):
            return self.nan
        left, right = self.value_of(x), self.value_of(y)
        if left is not None or right is not None:
            return self._scale(y, left) if left is not None else self._scale(x, right or 0)
        key = (x, y) if x <= y else (y, x)
        product = self.products.get(key)
        if product is None:
            a, b = self.polynomials[x], self.polynomials[y]
            if len(a) * len(b) > self.long:
                return self.products.setdefault(key, self.atom(Atom(PRODUCT, key)))
            self.spend(len(a) * len(b))
            result: dict[int, Number] = {}
            for (m, c), (n, d) in itertools.product(a.items(), b.items()):
                both = self._monomial_product(m, n)
                result[both] = result.get(both, 0) + c * d
            product = self.products[key] = self.intern({m: c for m, c in result.items() if c})
        return product

    def _monomial_product(self, m: int, n: int) -> int:
        key = (m, n) if m <= n else (n, m)
        index = self.monomial_products.get(key)
        if index is None:
            index = self.monomial_products[key] = self._monomial(tuple(sorted(self.monomials[m] + self.monomials[n])))
        return index

    def _inverse(self, x: int) -> int:
        """Invert a monomial atom by atom; the inverse of a longer polynomial, scaled to first coefficient 1, is one atom."""
        value = self.value_of(x)
        if value is not None and value != 0:
            return self.number(Fraction(1) / value)
        if not self.polynomials[x] or x == self.nan:
            return self.nan if x == self.nan else self.atom(Atom("inverse", (x,)))
        terms = self.polynomials[x]
        first = min(terms)
        scale = Fraction(1) / terms[first]
        if len(terms) > 1:
            return self._scale(self.atom(Atom("inverse", (self._scale(x, scale),))), scale)
        result = self.one
        for a in self.monomials[first]:
            result = self._mul(result, self.atom(Atom("inverse", (self.intern({self._monomial((a,)): 1}),))))
        return self._scale(result, scale)

    def _max(self, x: int, y: int) -> int:
        if self.nan in (x, y):
            return self.nan
        members: set[int] = set()
        for part in (x, y):
            atom = self.only_atom(part)
            members |= set(atom.arguments) if atom is not None and atom.name == "max" else {part}
        if self.inf in members:
            return self.inf
        members.discard(self.minus_inf)
        numbers = {m: v for m in members if (v := self.value_of(m)) is not None}
        members -= set(numbers)
        if numbers:
            members.add(max(numbers, key=lambda m: numbers[m]))
        if len(members) < 2:
            return members.pop() if members else self.minus_inf
        return self.atom(Atom("max", tuple(sorted(members))))

    # Arrays

    def _map(self, operation: Callable[..., int], *arrays: Array) -> Array:
        """Apply an operation elementwise, once to every distinct combination of elements."""
        arrays = tuple(np.broadcast_arrays(*arrays))
        rows = np.stack([a.reshape(-1) for a in arrays], 1)
        memo: dict[tuple, int] = {}
        results = []
        for row in map(tuple, rows.tolist()):
            result = memo.get(row)
            if result is None:
                result = memo[row] = operation(*row)
            results.append(result)
        return np.asarray(results, np.int64).reshape(arrays[0].shape)

    def constant(self, values: Array) -> Array:
        values = np.asarray(values)
        if values.dtype.kind == "c":
            unit = np.asarray(self.atom(Atom("imaginary unit")))
            return self.add(self.constant(np.real(values)), self.mul(self.constant(np.imag(values)), unit))
        memo: dict[Any, int] = {}
        cells = (values if values.dtype.kind in "biu" else values.astype(np.float64)).reshape(-1).tolist()
        ids = [memo[v] if v in memo else memo.setdefault(v, self._constant(v)) for v in cells]
        return np.asarray(ids, np.int64).reshape(values.shape)

    def _constant(self, value: float | int | bool) -> int:
        if value != value:
            return self.nan
        if abs(value) == math.inf:
            return self.inf if value > 0 else self.minus_inf
        exact = Fraction(value)
        return self.number(int(exact) if exact.denominator == 1 else exact)

    def add(self, x: Array, y: Array) -> Array:
        return self._map(self._add, x, y)

    def mul(self, x: Array, y: Array) -> Array:
        return self._map(self._mul, x, y)

    def neg(self, x: Array) -> Array:
        return self._map(lambda i: self._scale(i, -1), x)

    def div(self, x: Array, y: Array) -> Array:
        return self.mul(x, self._map(self._inverse, y))

    def maximum(self, x: Array, y: Array) -> Array:
        return self._map(self._max, x, y)

    def replaceable(self, x: Array) -> Array:
        return np.where(x == self.nan, self.atom(Atom("not a number")), x)

    def total(self, x: Array, axis: int) -> Array:
        x = np.moveaxis(x, axis, -1)
        rows = x.reshape(-1, x.shape[-1]).tolist()
        return np.asarray([self._sum(row) for row in rows], np.int64).reshape(x.shape[:-1])

    def function(self, name: str, *arrays: Array) -> Array:
        if not arrays:
            return np.asarray(self.atom(Atom(name)))
        return self._map(lambda *ids: self.atom(Atom(name, ids)), *arrays)

    def compare(self, name: str, x: Array, y: Array) -> Array:
        return self._map(lambda a, b: self._compare(name, a, b), x, y)

    def _compare(self, name: str, x: int, y: int) -> int:
        a, b = self.value_of(x), self.value_of(y)
        if a is not None and b is not None:
            return self.one if COMPARE[name](a, b) else self.zero
        if name in ("gt", "ge"):
            return self._compare("lt" if name == "gt" else "le", y, x)
        difference = self._add(x, self._scale(y, -1))
        if name in ("eq", "ne") and difference != self.nan:  # its sign does not matter
            terms = self.polynomials[difference]
            difference = self._scale(difference, 1 if not terms or terms[min(terms)] > 0 else -1)
        if self.value_of(difference) is not None:
            return self._compare(name, difference, self.zero)
        return self.atom(Atom(name, (difference, self.zero)))

    def additive(self, name: str, x: Array) -> Array:
        """Apply an additive function to the terms of a polynomial, one by one."""

        def apply(i: int) -> int:
            parts = self.polynomials[i].items()
            return self._sum([self._scale(self.atom(Atom(name, (self.intern({m: 1}),))), c) for m, c in parts])

        return self._map(apply, x)
