"""A relaxation of `solve`, a hundred times faster: could a dimension of a body's input be partitioned at all?

Every variable has a set of states, without digits, from which equations rule some out (arc consistency). If an equation has no
combination left, the body has no solution; if all have some, it may still have none. `choices` is slowest where nothing follows
from any state, which is the case that this decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.propagation.nested.programs import nested_body
from unity.pcg.propagation.solver import NESTED
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import Spec, matching
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State, partitioned

Row = tuple[State, ...]  # a combination of states of an equation's operands and results


class Position(NamedTuple):
    """A variable where an equation reads or produces it.

    Attributes:
        variable: the variable.
        is_operand: whether the equation reads it.
        rows: for each state that it may have there, the equation's combinations with it, as bits.
    """

    variable: int
    is_operand: bool
    rows: Mapping[State, int]


@dataclass(frozen=True, eq=False)
class RelaxedEquation:
    """The combinations of states that one equation allows: `every` has a bit for each."""

    every: int
    positions: tuple[Position, ...]


class Relaxed:
    """The equations of a body without the digits of their factors, each with its allowed combinations of states."""

    def __init__(self, body: Body) -> None:
        self.inputs = frozenset(body.inputs)
        self.equations = list(_relaxed_equations(body, {v: v for v in body.tensors}, count(max(body.tensors, default=-1) + 1)))
        self.touching: dict[int, list[int]] = {}
        for i, equation in enumerate(self.equations):
            for v in {position.variable for position in equation.positions}:
                self.touching.setdefault(v, []).append(i)

    def may_partition(self, dims: Collection[tuple[int, int]]) -> bool:
        """Return whether each of some inputs may be partitioned at a dimension, as far as the relaxation can tell.

        Args:
            dims: pairs of an input and a dimension. They need not go together.
        """
        pending = set(dims)
        while pending:
            domains = self._domains(*pending.pop())
            if domains is None:
                return False
            # Inputs that must be partitioned with that one may be: the domains are consistent with them alone, too.
            alone = ((v, state) for v, states in domains.items() if len(states) == 1 for state in states)
            pending -= {(v, state.dim) for v, state in alone if state.kind == "P"}
        return True

    def _domains(self, variable: int, dim: int) -> Mapping[int, frozenset[State]] | None:
        """Return the states that others may have if an input is partitioned at a dimension, or None if an equation has none."""
        domains: dict[int, frozenset[State]] = {variable: frozenset({partitioned(dim)})}
        queue = list(self.touching.get(variable, ()))
        while queue:
            equation = self.equations[queue.pop()]
            rows = equation.every
            for position in equation.positions:
                rows &= self._allowed(domains, position) if position.variable in domains else rows
            if not rows:
                return None
            for v, is_operand, possible in equation.positions:
                states = frozenset(state for state, some in possible.items() if some & rows)
                if v not in self.inputs and REPLICATED in states and is_operand:
                    states |= {PARTIAL}  # it may be reduced where it is produced
                if v not in domains or not domains[v] <= states:
                    domains[v] = domains.get(v, states) & states
                    queue += self.touching[v]
        return domains

    def _allowed(self, domains: Mapping[int, frozenset[State]], position: Position) -> int:
        """Return the combinations of an equation, as bits, whose state at a position its variable may have.

        A partial sum that is reduced where it is produced is read as replicated.
        """
        states, allowed = domains[position.variable], 0
        for state in states:
            allowed |= position.rows.get(state, 0)
        if position.is_operand and PARTIAL in states and position.variable not in self.inputs:
            allowed |= position.rows.get(REPLICATED, 0)
        return allowed


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
            rows = _rows(e, spec_of(body, e) or Spec(()))
            variables = [(p, a) for p, a in enumerate((*operands, *results)) if isinstance(a, int)]
            positions = tuple(Position(v, p < len(operands), _rows_by_state(rows, p)) for p, v in variables)
            yield RelaxedEquation((1 << len(rows)) - 1, positions)


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


def _rows_by_state(rows: Sequence[Row], position: int) -> dict[State, int]:
    """Return for each state that combinations have at a position which of them have it, as bits."""
    having: dict[State, int] = {}
    for k, row in enumerate(rows):
        having[row[position]] = having.get(row[position], 0) | 1 << k
    return having


def _without_digit(state: State) -> State:
    return state._replace(outer=1) if state.outer > 1 else state
