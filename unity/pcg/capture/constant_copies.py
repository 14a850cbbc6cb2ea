"""Copies of constants for the equations that read them, so that each may have another part of a constant.

The rows and the columns of a mask are often numbered by one `iota`. As one variable of an operator it would have one state, so that
neither could be partitioned. Constants are computed from literals, in a few cheap equations (`heavy_operators.constants`); no
embedded array is copied.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count

from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED, SCANNED


def with_own_constants(body: Body) -> Body:
    """Return a body in which no two operands of operators are the same constant array: each is a copy.

    The nested programs of scans and remats read a constant from outside of them, where all may read the same.
    """
    producers = constants(body)
    reading = [() if e.name in SCANNED + REMATERIALIZED else e.operands for e in body.equations]
    operands = Counter(a for each in reading for a in each if isinstance(a, int) and a in producers)
    shared = {a for a, n in operands.items() if n > 1 and body.tensors[a].ndim}
    if not shared:
        return body
    copies = _Copies(body)
    for e, each in zip(body.equations, reading, strict=True):
        own = tuple(copies.copied(a) if isinstance(a, int) and a in shared else a for a in each)
        copies.add(e.reading(own) if shared.intersection(each) else e)
    return used(Body(body.inputs, body.outputs, tuple(copies.equations), copies.tensors))


class _Copies:
    """The equations of a body and copies of its constants."""

    def __init__(self, body: Body) -> None:
        self.tensors = dict(body.tensors)
        self.numbers = count(max(body.tensors, default=-1) + 1)  # of new variables
        self.equations: list[Equation] = []
        self.number: dict[int, int] = {}  # variable → its equation in `equations`

    def add(self, equation: Equation) -> None:
        self.number.update((v, len(self.equations)) for v in equation.results)
        self.equations.append(equation)

    def copied(self, variable: int) -> int:
        """Add a copy of a constant, and of all constants that it is computed from, and return its variable."""
        equation = self.equations[self.number[variable]]
        operands = tuple(self.copied(a) if isinstance(a, int) else a for a in equation.operands)
        results = dict(zip(equation.results, self.numbers, strict=False))
        self.tensors.update((copy, self.tensors[v]) for v, copy in results.items())
        self.add(replace(equation.reading(operands), results=tuple(results.values())))
        return results[variable]
