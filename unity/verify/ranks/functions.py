"""The elementwise functions of symbols, and the laws of those that are not polynomial."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import z3

if TYPE_CHECKING:
    from unity.verify.ranks.symbolic import SymbolicDomain


def _remainder(d: SymbolicDomain, a: Any, b: Any) -> Any:
    """The remainder with the sign of the dividend."""
    rest = d.quotient(z3.If(a >= 0, a, -a), z3.If(b >= 0, b, -b))[1]
    value = d.applied("rem", d.element_sort, a, b)
    d.facts.append(z3.Implies(b != 0, value == z3.If(a >= 0, rest, -rest)))
    return value


def _square_root(d: SymbolicDomain, a: Any) -> Any:
    value = d.applied("sqrt", d.element_sort, a)
    d.facts.append(z3.Implies(a >= 0, z3.And(value >= 0, value * value == a)))
    return value


def _reciprocal_root(d: SymbolicDomain, a: Any) -> Any:
    return d.apply("constant", 1) / _square_root(d, a)


def _exponential(d: SymbolicDomain, a: Any) -> Any:
    value = d.applied("exp", d.element_sort, a)
    d.note("exp", value)
    return value


def _logarithm(d: SymbolicDomain, a: Any) -> Any:
    value = d.applied("log", d.element_sort, a)
    d.note("log", value)
    return value


def _power(d: SymbolicDomain, a: Any, b: Any) -> Any:
    """A power: a product for a small whole exponent, else by its size, and of a positive base by its sign."""
    if z3.is_rational_value(b) and b.denominator_as_long() == 1 and abs(b.numerator_as_long()) <= 4:
        value, number = 1 + 0 * a, b.numerator_as_long()  # defined where the base is
        for _ in range(abs(number)):
            value = value * a
        return value if number >= 0 else 1 / value
    size = _exponential(d, b * _logarithm(d, z3.If(a >= 0, a, -a)))
    value = d.applied("pow", d.element_sort, a, b)
    d.facts += [z3.Implies(a > 0, value == size), z3.Implies(a != 0, z3.Or(value == size, value == -size))]
    return value


def _least(a: Any, b: Any) -> Any:
    return z3.If(a <= b, a, b)


def _greatest(a: Any, b: Any) -> Any:
    return z3.If(a >= b, a, b)


MEANINGS: dict[str, Callable[..., Any]] = {
    "neg": lambda d, a: -a,
    "add": lambda d, a, b: a + b,
    "sub": lambda d, a, b: a - b,
    "mul": lambda d, a, b: a * b,
    "div": lambda d, a, b: a / b,
    "rem": _remainder,
    "abs": lambda d, a: z3.If(a >= 0, a, -a),
    "sign": lambda d, a: z3.If(a > 0, d.apply("constant", 1), z3.If(a < 0, d.apply("constant", -1), d.apply("constant", 0))),
    "max": lambda d, a, b: _greatest(a, b),
    "min": lambda d, a, b: _least(a, b),
    "clamp": lambda d, lo, a, hi: _least(_greatest(a, lo), hi),
    "select": lambda d, p, a, b: z3.If(p, a, b),
    "eq": lambda d, a, b: a == b,
    "ne": lambda d, a, b: a != b,
    "lt": lambda d, a, b: a < b,
    "le": lambda d, a, b: a <= b,
    "gt": lambda d, a, b: a > b,
    "ge": lambda d, a, b: a >= b,
    "logical_and": lambda d, a, b: z3.And(a, b),
    "logical_or": lambda d, a, b: z3.Or(a, b),
    "logical_xor": lambda d, a, b: z3.Xor(a, b),
    "logical_not": lambda d, a: z3.Not(a),
    "exp": _exponential,
    "log": _logarithm,
    "sqrt": _square_root,
    "rsqrt": _reciprocal_root,
    "pow": _power,
}


def _zero_exponent(d: SymbolicDomain, value: Any, a: Any) -> list[Any]:
    return [value > 0, z3.Implies(a == 0, value == 1), d.applied("log", d.element_sort, value) == a]


def _inverse(d: SymbolicDomain, value: Any, a: Any) -> list[Any]:
    return [z3.Implies(a > 0, d.applied("exp", d.element_sort, value) == a), z3.Implies(a == 1, value == 0)]


LAWS: dict[str, Callable[..., list[Any]]] = {"exp": _zero_exponent, "log": _inverse}
