"""Whether a dimension of a body's input could be partitioned at all: a relaxation of `solve`, which takes a hundredth of its time.

States without digits are left to every variable that no equation rules out (arc consistency). Where an equation has none left there
is no solution; where all have some there may still be none. To find that nothing follows from any state takes `choices` longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.propagation.solver import NESTED, nested_body, spec_of
from unity.pcg.types.factors import Spec, matching
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State, partitioned

Row = tuple[State, ...]  # what an equation's operands and results may be together


@dataclass(frozen=True, eq=False)
class Part:
    """What one equation allows, and where its variables stand: (position, variable, whether it is read)."""

    rows: Sequence[Row]
    places: tuple[tuple[int, int, bool], ...]


class Relaxed:
    """A body's equations without the digits of their factors; what each allows is listed once."""

    def __init__(self, body: Body) -> None:
        self.inputs = frozenset(body.inputs)
        self.parts = list(_parts(body, {v: v for v in body.tensors}, count(max(body.tensors, default=-1) + 1)))
        self.touching: dict[int, list[int]] = {}
        for i, part in enumerate(self.parts):
            for v in {v for _, v, _ in part.places}:
                self.touching.setdefault(v, []).append(i)

    def may(self, variable: int, dim: int) -> bool:
        """Whether an input may be partitioned at a dimension, as far as the relaxation tells."""
        left: dict[int, frozenset[State]] = {variable: frozenset({partitioned(dim)})}
        waiting = list(self.touching.get(variable, ()))
        while waiting:
            part = self.parts[waiting.pop()]
            rows = [row for row in part.rows if all(self.agrees(left, v, row[p], read) for p, v, read in part.places)]
            if not rows:
                return False
            for p, v, read in part.places:
                states = frozenset(row[p] for row in rows)
                if v not in self.inputs and REPLICATED in states and read:
                    states |= {PARTIAL}  # it may be reduced where it is made
                if v not in left or not left[v] <= states:
                    left[v] = left.get(v, states) & states
                    waiting += self.touching[v]
        return True

    def agrees(self, left: Mapping[int, frozenset[State]], variable: int, state: State, read: bool) -> bool:
        """Whether an equation may make or read a variable in a state. A sum that is reduced where it is made is read whole."""
        if variable not in left or state in left[variable]:
            return True
        return read and state == REPLICATED and PARTIAL in left[variable] and variable not in self.inputs


def _parts(body: Body, names: Mapping[int, Atom], new: Iterator[int]) -> Iterator[Part]:
    """The equations of a body whose variables have other names outside. Programs inside of equations are left out, but for
    those with a rule for tangents: whatever such a one allows solves its program, so the program's equations stand for it.
    """
    for e in body.equations:
        operands = [names[a] if isinstance(a, int) else a for a in e.operands]
        results = [names[v] for v in e.results]
        if e.name == "custom_jvp_call":
            yield from _inside(nested_body(e), operands, results, new)
        elif e.name not in NESTED:
            n = len(operands)
            places = ((p, a, p < n) for p, a in enumerate((*operands, *results)) if isinstance(a, int))
            yield Part(_rows(e, spec_of(body, e) or Spec(())), tuple(places))


def _inside(body: Body, operands: Sequence[Atom], results: Sequence[Atom], new: Iterator[int]) -> Iterator[Part]:
    """A program's parts, by the names around it. A result that it does not make itself is left to be anything."""
    ends = {a: v for a, v in zip(body.outputs, results, strict=True) if isinstance(a, int)}
    made = {v: ends[v] if v in ends else next(new) for e in body.equations for v in e.results}
    return _parts(body, made | dict(zip(body.inputs, operands, strict=True)), new)


def _rows(equation: Equation, spec: Spec) -> list[Row]:
    found = matching(spec, {}, len(equation.operands), len(equation.results))
    return list(dict.fromkeys(tuple(map(_without_digit, m.operands + m.results)) for m in found))


def _without_digit(state: State) -> State:
    return state._replace(outer=1) if state.outer > 1 else state
