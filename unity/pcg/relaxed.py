"""Whether a dimension of a body's input could be partitioned at all: a relaxation of `solve`, which takes a hundredth of its time.

States without digits are left to every variable that no equation rules out (arc consistency). Where an equation has none left there
is no solution; where all have some there may still be none. To find that nothing follows from any state takes `choices` longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity.pcg.body import Body, Equation
from unity.pcg.factors import Spec, matching
from unity.pcg.solve import NESTED, spec_of
from unity.pcg.state import PARTIAL, REPLICATED, State, partitioned

Row = tuple[State, ...]  # what an equation's operands and results may be together


class Relaxed:
    """A body's equations without the digits of their factors; what each allows is listed once."""

    def __init__(self, body: Body) -> None:
        self.body, self.inputs = body, frozenset(body.inputs)
        self.rows: dict[int, Sequence[Row] | None] = {}

    def may(self, variable: int, dim: int) -> bool:
        """Whether an input may be partitioned at a dimension, as far as the relaxation tells."""
        left: dict[int, frozenset[State]] = {variable: frozenset({partitioned(dim)})}
        waiting = list(self.body.touching.get(variable, ()))
        while waiting:
            i = waiting.pop()
            rows = self.of(i)
            if rows is None:
                continue
            places = self.places(self.body.equations[i])
            n = len(self.body.equations[i].operands)
            rows = [row for row in rows if all(self.agrees(left, a, row[p], p < n) for p, a in places)]
            if not rows:
                return False
            for p, v in places:
                states = frozenset(row[p] for row in rows)
                if v not in self.inputs and REPLICATED in states and p < n:
                    states |= {PARTIAL}  # it may be reduced where it is made
                if v not in left or not left[v] <= states:
                    left[v] = left.get(v, states) & states
                    waiting += self.body.touching[v]
        return True

    def agrees(self, left: Mapping[int, frozenset[State]], variable: int, state: State, read: bool) -> bool:
        """Whether an equation may make or read a variable in a state. A sum that is reduced where it is made is read whole."""
        if variable not in left or state in left[variable]:
            return True
        return read and state == REPLICATED and PARTIAL in left[variable] and variable not in self.inputs

    def places(self, equation: Equation) -> list[tuple[int, int]]:
        """The variables of an equation, each with its position: operands, then results."""
        return [(p, a) for p, a in enumerate((*equation.operands, *equation.results)) if isinstance(a, int)]

    def of(self, i: int) -> Sequence[Row] | None:
        """What an equation allows; None for one with a program inside."""
        if i not in self.rows:
            equation = self.body.equations[i]
            self.rows[i] = None if equation.name in NESTED else _rows(equation, spec_of(self.body, equation) or Spec(()))
        return self.rows[i]


def _rows(equation: Equation, spec: Spec) -> list[Row]:
    found = matching(spec, {}, len(equation.operands), len(equation.results))
    return list(dict.fromkeys(tuple(map(_without_digit, m.operands + m.results)) for m in found))


def _without_digit(state: State) -> State:
    return state._replace(outer=1) if state.outer > 1 else state
