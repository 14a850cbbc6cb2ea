"""A relaxation of `solve`, a hundred times faster: could a dimension of a body's input be partitioned at all?

Every variable has a set of states, without digits, from which equations rule some out (arc consistency). If an equation has no
combination left, the body has no solution; if all have some, it may still have none. `choices` is slowest where nothing follows
from any state, which is the case that this decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.propagation.nested_programs import nested_body
from unity.pcg.propagation.solver import NESTED
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import Spec, matching
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State, partitioned

Row = tuple[State, ...]  # a combination of states of an equation's operands and results


@dataclass(frozen=True, eq=False)
class RelaxedEquation:
    """The combinations of states that one equation allows.

    Attributes:
        rows: the combinations, one state for each position.
        places: for each variable of the equation (position, variable, whether it is an operand).
    """

    rows: Sequence[Row]
    places: tuple[tuple[int, int, bool], ...]


class Relaxed:
    """The equations of a body without the digits of their factors, each with its allowed combinations of states."""

    def __init__(self, body: Body) -> None:
        self.inputs = frozenset(body.inputs)
        self.equations = list(_relaxed_equations(body, {v: v for v in body.tensors}, count(max(body.tensors, default=-1) + 1)))
        self.touching: dict[int, list[int]] = {}
        for i, equation in enumerate(self.equations):
            for v in {v for _, v, _ in equation.places}:
                self.touching.setdefault(v, []).append(i)

    def may_partition(self, variable: int, dim: int) -> bool:
        """Return whether an input may be partitioned at a dimension, as far as the relaxation can tell."""
        domains: dict[int, frozenset[State]] = {variable: frozenset({partitioned(dim)})}
        queue = list(self.touching.get(variable, ()))
        while queue:
            equation = self.equations[queue.pop()]
            rows = [row for row in equation.rows if all(self._agrees(domains, v, row[p], read) for p, v, read in equation.places)]
            if not rows:
                return False
            for p, v, read in equation.places:
                states = frozenset(row[p] for row in rows)
                if v not in self.inputs and REPLICATED in states and read:
                    states |= {PARTIAL}  # it may be reduced where it is produced
                if v not in domains or not domains[v] <= states:
                    domains[v] = domains.get(v, states) & states
                    queue += self.touching[v]
        return True

    def _agrees(self, domains: Mapping[int, frozenset[State]], variable: int, state: State, read: bool) -> bool:
        """Return whether an equation may produce or read a variable in a state.

        A partial sum that is reduced where it is produced is read as replicated.
        """
        if variable not in domains or state in domains[variable]:
            return True
        return read and state == REPLICATED and PARTIAL in domains[variable] and variable not in self.inputs


def _relaxed_equations(body: Body, names: Mapping[int, Atom], new: Iterator[int]) -> Iterator[RelaxedEquation]:
    """Yield the equations of a body with their variables renamed by `names`.

    Equations with nested programs are omitted, except for those of a `custom_jvp`: any match of such an equation solves its
    program, so that the program's equations replace it.
    """
    for e in body.equations:
        operands = [names[a] if isinstance(a, int) else a for a in e.operands]
        results = [names[v] for v in e.results]
        if e.name == "custom_jvp_call":
            yield from _nested_equations(nested_body(e), operands, results, new)
        elif e.name not in NESTED:
            n = len(operands)
            places = ((p, a, p < n) for p, a in enumerate((*operands, *results)) if isinstance(a, int))
            yield RelaxedEquation(_rows(e, spec_of(body, e) or Spec(())), tuple(places))


def _nested_equations(
    body: Body, operands: Sequence[Atom], results: Sequence[Atom], new: Iterator[int]
) -> Iterator[RelaxedEquation]:
    """Yield a nested program's equations in the variables of the enclosing one; a result that it only forwards is unconstrained."""
    outer = {a: v for a, v in zip(body.outputs, results, strict=True) if isinstance(a, int)}
    produced = {v: outer[v] if v in outer else next(new) for e in body.equations for v in e.results}
    return _relaxed_equations(body, produced | dict(zip(body.inputs, operands, strict=True)), new)


def _rows(equation: Equation, spec: Spec) -> list[Row]:
    """Return the distinct combinations of states, without digits, that an equation allows."""
    matches = matching(spec, {}, len(equation.operands), len(equation.results))
    return list(dict.fromkeys(tuple(map(_without_digit, m.operands + m.results)) for m in matches))


def _without_digit(state: State) -> State:
    return state._replace(outer=1) if state.outer > 1 else state
