"""Copies of constants for their readers, so that a device may hold another part of a constant for each of them.

The rows and the columns of a mask are often numbered by one `iota`. As one variable of an operator it would have one state, so that
neither could be partitioned.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count

from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Body, Equation


def with_own_constants(body: Body) -> Body:
    """Return a body in which every operand that is a constant array is a copy of its own."""
    producers = constants(body)
    operands = Counter(a for e in body.equations for a in e.operands if isinstance(a, int) and a in producers)
    shared = {a for a, n in operands.items() if n > 1 and body.tensors[a].ndim}
    if not shared:
        return body
    copies = _Copies(body)
    for e in body.equations:
        own = tuple(copies.copied(a) if isinstance(a, int) and a in shared else a for a in e.operands)
        copies.add(e.reading(own) if shared.intersection(e.operands) else e)
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
