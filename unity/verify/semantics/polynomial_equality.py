"""Whether two polynomials are equal, and if not, at which numbers they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import z3

from unity.verify.semantics.domains import Array, digest

if TYPE_CHECKING:
    from unity.verify.semantics.symbolic import Atom, Symbolic

Number = int | Fraction
PRODUCT = "product"  # of two polynomials, as one atom
DECIDABLE = 3_000  # terms of polynomials that Z3 is given


@dataclass(frozen=True)
class Comparison:
    """Whether two arrays are equal: "equal", "different" (with the symbols' values that show it) or "unknown"."""

    answer: str
    at: tuple[int, ...] = ()  # an index where they differ
    values: Mapping[str, Number] | None = None
    left: float = 0.0
    right: float = 0.0
    functions: tuple[str, ...] = ()  # unknown ones, which the values were chosen for too


COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}
REAL = "exp expm1 log log1p sin cos tan asin acos atan sinh cosh tanh sqrt erf erfc"
KNOWN: Mapping[str, Callable[..., Any]] = {  # what counterexamples are evaluated with; anything else is any function
    **{name: getattr(math, name) for name in REAL.split()},
    **{name: (lambda a, b, f=f: int(f(a, b))) for name, f in COMPARE.items()},
    "max": max,
    PRODUCT: lambda a, b: a * b,
    "inverse": lambda x: 1 / Fraction(x),
    "inf": lambda: 10**9,
    "div of integers": lambda x, y: math.trunc(Fraction(x) / Fraction(y)),
    "rem": lambda x, y: x - y * math.trunc(Fraction(x) / Fraction(y)),
    **{f"as {kind}{bits}": math.trunc for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    "abs": abs,
    "sign": lambda x: (x > 0) - (x < 0),
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "logistic": lambda x: 1 / (1 + math.exp(-x)),
    "pow": lambda x, y: math.pow(x, y),
}


def symbols_in(table: Symbolic, x: int) -> list[int]:
    """The symbols (by number of atom) that a polynomial is made of, also inside functions."""
    found: dict[int, None] = {}
    seen, stack = set(), [x]
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        for m in table.polynomials[i]:
            for a in table.monomials[m]:
                if table.atoms[a].symbol:
                    found[a] = None
                stack += table.atoms[a].arguments
    return list(found)


def evaluate(table: Symbolic, x: int, values: Mapping[int, Number], memo: dict[int, Any], chosen: dict[str, None]) -> Any:
    """A polynomial's value where symbols (by number of atom) have values.

    Functions of which nothing is known are hashes of their arguments; their names are added to `chosen`.
    """
    if x not in memo:
        total: Any = 0
        for m, c in table.polynomials[x].items():
            factors = [_atom_value(table, a, values, memo, chosen) for a in table.monomials[m]]
            total += math.prod(factors, start=c)
        memo[x] = total
    return memo[x]


def _atom_value(table: Symbolic, a: int, values: Mapping[int, Number], memo: dict[int, Any], chosen: dict[str, None]) -> Any:
    atom = table.atoms[a]
    if atom.symbol:
        return values[a]
    given = [evaluate(table, i, values, memo, chosen) for i in atom.arguments]
    known = KNOWN.get(atom.name)
    try:
        if known is not None:
            return known(*given)
    except (ValueError, OverflowError, ZeroDivisionError):  # outside of its range: any value will do
        pass
    chosen[atom.name] = None
    return digest(atom.name, *map(str, given)) % 97


def equal(table: Symbolic, left: Array, right: Array, tries: int = 6, timeout: float = 2.0) -> Comparison:
    """Whether two arrays of one shape are equal: by normal form, by numbers, and by Z3 where neither tells."""
    apart = np.argwhere(left != right)
    if not len(apart):
        return Comparison("equal")
    open_ = []
    for at in sorted(map(tuple, apart.tolist())):
        a, b = int(left[at]), int(right[at])
        found = _counterexample(table, a, b, tries)
        if found is not None:
            chosen: dict[str, None] = {}
            x, y = (float(evaluate(table, i, found, {}, chosen)) for i in (a, b))
            named = {table.atoms[s].name: v for s, v in found.items()}
            return Comparison("different", at, named, x, y, tuple(chosen))
        open_.append((at, a, b))
    for at, a, b in open_[:8]:
        if not _decided_equal(table, a, b, timeout):
            return Comparison("unknown", at)
    return Comparison("equal" if len(open_) <= 8 else "unknown", open_[0][0])


def _counterexample(table: Symbolic, a: int, b: int, tries: int) -> dict[int, Number] | None:
    """Small numbers for the symbols at which two polynomials differ: as many as possible are zero."""
    symbols = sorted({*symbols_in(table, a), *symbols_in(table, b)})
    for k in range(tries):
        sign = (1, -1) if k % 2 else (1, 1)
        values: dict[int, Number] = {s: (1 + digest(s, k) % (2 + 3 * k)) * sign[digest(k, s) % 2] for s in symbols}
        if not _differ(table, a, b, values):
            continue
        for s in symbols:
            fewer = {**values, s: 0}
            values = fewer if _differ(table, a, b, fewer) else values
        return values
    return None


def _differ(table: Symbolic, a: int, b: int, values: Mapping[int, Number]) -> bool:
    memo: dict[int, Any] = {}
    x, y = (evaluate(table, i, values, memo, {}) for i in (a, b))
    if not isinstance(x, float) and not isinstance(y, float):
        return x != y
    try:  # real functions were evaluated, and rounded
        return abs(x) + abs(y) < 1e9 and not math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-6)
    except OverflowError:
        return False


# Z3


def expression(table: Symbolic, x: int, memo: dict[int, Any] | None = None) -> Any:
    """A polynomial for Z3: maxima are ifs, inverses are divisions, other functions are unknown. `memo`: what is written already."""
    memo = {} if memo is None else memo
    if x not in memo:
        terms = [
            math.prod((_atom_expression(table, table.atoms[a], memo) for a in table.monomials[m]), start=z3.RealVal(str(c)))
            for m, c in table.polynomials[x].items()
        ]
        memo[x] = z3.RealVal(0) + sum(terms, z3.RealVal(0))
    return memo[x]


def _atom_expression(table: Symbolic, atom: Atom, memo: dict[int, Any]) -> Any:
    if not atom.arguments:
        return z3.Real(atom.name)
    given: list[Any] = [expression(table, i, memo) for i in atom.arguments]
    if atom.name == "inverse":
        return 1 / given[0]
    if atom.name == PRODUCT:
        return given[0] * given[1]
    if atom.name == "max":
        result = given[0]
        for other in given[1:]:
            result = z3.If(result >= other, result, other)
        return result
    return z3.Function(atom.name, *[z3.RealSort()] * (len(given) + 1))(*given)


def _decided_equal(table: Symbolic, a: int, b: int, timeout: float) -> bool:
    if len(table.polynomials[a]) + len(table.polynomials[b]) > DECIDABLE:
        return False
    solver = z3.Solver()
    solver.set("timeout", int(1000 * timeout))
    memo: dict[int, Any] = {}
    solver.add(expression(table, a, memo) != expression(table, b, memo))
    return solver.check() == z3.unsat
