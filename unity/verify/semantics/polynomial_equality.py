"""Comparison of polynomials: equal, or different at some numbers for their symbols."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import z3

from unity.verify.semantics.domains import Array, digest
from unity.verify.semantics.symbolic import COMPARE, PRODUCT, Atom, Number, Symbolic

MOST_TERMS = 3_000  # of both polynomials, for Z3
MOST_UNDECIDED = 8  # pairs of elements, for Z3


@dataclass(frozen=True)
class Comparison:
    """The answer "equal", "different" (with values of the symbols that show it) or "unknown", for two arrays."""

    answer: str
    at: tuple[int, ...] = ()  # an index where they differ
    values: Mapping[str, Number] | None = None
    left: float = 0.0
    right: float = 0.0
    functions: tuple[str, ...] = ()  # uninterpreted ones, for which values were chosen as well


REAL = "exp expm1 log log1p sin cos tan asin acos atan sinh cosh tanh sqrt erf erfc"
FUNCTIONS: Mapping[str, Callable[..., Any]] = {  # by which counterexamples are evaluated; others may be any function
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
    """Return the symbols, as indices of atoms, in a polynomial and inside of its functions."""
    symbols: dict[int, None] = {}
    visited, stack = set(), [x]
    while stack:
        i = stack.pop()
        if i in visited:
            continue
        visited.add(i)
        for m in table.polynomials[i]:
            for a in table.monomials[m]:
                if table.atoms[a].symbol:
                    symbols[a] = None
                stack += table.atoms[a].arguments
    return list(symbols)


def evaluate(table: Symbolic, x: int, values: Mapping[int, Number], memo: dict[int, Any], chosen: dict[str, None]) -> Any:
    """Evaluate a polynomial.

    Args:
        table: of the polynomials.
        x: the index of the polynomial.
        values: of the symbols, by the index of their atoms.
        memo: values of polynomials that were evaluated before.
        chosen: collects the names of uninterpreted functions, whose values are hashes of their arguments.
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
    arguments = [evaluate(table, i, values, memo, chosen) for i in atom.arguments]
    function = FUNCTIONS.get(atom.name)
    try:
        if function is not None:
            return function(*arguments)
    except (ValueError, OverflowError, ZeroDivisionError):  # outside of its domain: any value will do
        pass
    chosen[atom.name] = None
    return digest(atom.name, *map(str, arguments)) % 97


def compare(table: Symbolic, left: Array, right: Array, tries: int = 6, timeout: float = 2.0) -> Comparison:
    """Compare two arrays of one shape: by canonical form, else by numbers, else by Z3.

    Args:
        table: of the polynomials.
        left: indices of polynomials.
        right: likewise.
        tries: how many numbers are tried for the symbols of two elements.
        timeout: of Z3, in seconds for each pair of elements.
    """
    differing = np.argwhere(left != right)
    if not len(differing):
        return Comparison("equal")
    undecided = []
    for at in sorted(map(tuple, differing.tolist())):
        a, b = int(left[at]), int(right[at])
        values = _counterexample(table, a, b, tries)
        if values is not None:
            chosen: dict[str, None] = {}
            x, y = (float(evaluate(table, i, values, {}, chosen)) for i in (a, b))
            named = {table.atoms[s].name: v for s, v in values.items()}
            return Comparison("different", at, named, x, y, tuple(chosen))
        undecided.append((at, a, b))
    for at, a, b in undecided[:MOST_UNDECIDED]:
        if not _is_equal_by_z3(table, a, b, timeout):
            return Comparison("unknown", at)
    return Comparison("equal" if len(undecided) <= MOST_UNDECIDED else "unknown", undecided[0][0])


def _counterexample(table: Symbolic, a: int, b: int, tries: int) -> dict[int, Number] | None:
    """Return small numbers for the symbols at which two polynomials differ, as many of them zero as possible."""
    symbols = sorted({*symbols_in(table, a), *symbols_in(table, b)})
    for k in range(tries):
        sign = (1, -1) if k % 2 else (1, 1)
        values: dict[int, Number] = {s: (1 + digest(s, k) % (2 + 3 * k)) * sign[digest(k, s) % 2] for s in symbols}
        if not _differ(table, a, b, values):
            continue
        for s in symbols:
            simpler = {**values, s: 0}
            values = simpler if _differ(table, a, b, simpler) else values
        return values
    return None


def _differ(table: Symbolic, a: int, b: int, values: Mapping[int, Number]) -> bool:
    """Return whether two polynomials have different values, beyond rounding."""
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
    """Return a polynomial for Z3: maxima are ifs, inverses are divisions, other functions are uninterpreted."""
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
    arguments: list[Any] = [expression(table, i, memo) for i in atom.arguments]
    if atom.name == "inverse":
        return 1 / arguments[0]
    if atom.name == PRODUCT:
        return arguments[0] * arguments[1]
    if atom.name == "max":
        result = arguments[0]
        for other in arguments[1:]:
            result = z3.If(result >= other, result, other)
        return result
    return z3.Function(atom.name, *[z3.RealSort()] * (len(arguments) + 1))(*arguments)


def _is_equal_by_z3(table: Symbolic, a: int, b: int, timeout: float) -> bool:
    """Return whether Z3 proves two polynomials equal."""
    if len(table.polynomials[a]) + len(table.polynomials[b]) > MOST_TERMS:
        return False
    solver = z3.Solver()
    solver.set("timeout", int(1000 * timeout))
    memo: dict[int, Any] = {}
    solver.add(expression(table, a, memo) != expression(table, b, memo))
    return solver.check() == z3.unsat
