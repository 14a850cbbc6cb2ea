"""States spread through a body, from what is known to what follows. What each equation allows is said by `solve`.

Where a partial sum meets an operator that is not linear, a Reduce is put inside the body (a soft-max over a partitioned dimension
needs two small ones). No other communication happens inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from unity.pcg.body import Atom, Body, Equation, Literal
from unity.pcg.factors import Match
from unity.pcg.jaxprs import NESTING
from unity.pcg.state import PARTIAL, REPLICATED, UNUSED, State

Matches = Callable[[Body, Equation, Mapping[int, State]], Sequence[Match]]  # an equation's choices that agree with known states


@dataclass(frozen=True)
class Solution:
    """States of a body's variables along one axis. `reduced[v]`: v is partial where it is made and reduced at once."""

    states: Mapping[int, State]
    reduced: Mapping[int, str]
    matches: tuple[Match, ...]  # one for each equation
    operands: tuple[State, ...]
    results: tuple[State, ...]

    @property
    def communicates(self) -> bool:
        """Whether devices along the axis communicate while the body runs, or while its derivative does: a reduce inside of it, a
        halo, or an agreement in a nested program."""
        return bool(self.reduced) or any(match.communicates for match in self.matches)

    def seen(self, variable: int) -> State:
        """The state in which later equations find a variable."""
        return REPLICATED if variable in self.reduced else self.states[variable]


class Conflict(Exception):
    """No choice of an equation agrees with the states around it; `variable` could be reduced first."""

    def __init__(self, variable: int | None) -> None:
        self.variable = variable


class Unmatched(Exception):
    """The whole body has no solution with these states."""


class Propagation:
    """States spread from what is known to what follows, equation by equation, until nothing is open."""

    def __init__(self, body: Body, known: Mapping[int, State], reduced: Mapping[int, str], allows: Matches) -> None:
        self.body, self.reduced, self.allows = body, dict(reduced), allows
        self.states: dict[int, State] = {}
        self.matches: list[Match | None] = [None] * len(body.equations)
        self.constants = constants(body)
        self.queue: list[int] = []
        self.later: set[int] = set()  # those with programs inside: what these allow is asked when the most is known around them
        for v, s in known.items():
            self.set(v, s)

    def set(self, variable: int, state: State) -> None:
        old = self.states.get(variable)
        if old is None:
            self.states[variable] = state
            self.queue += self.body.touching.get(variable, ())
        elif old is not state and old != state:
            raise Conflict(variable if PARTIAL in (old, state) else None)

    def view(self, i: int) -> dict[int, State]:
        """The known states at the positions of an equation: operands as seen, results as made."""
        e, known, states, reduced = self.body.equations[i], dict[int, State](), self.states, self.reduced
        position = 0
        for a in e.operands:
            if isinstance(a, int):
                if a in reduced:
                    known[position] = REPLICATED
                elif a in states:
                    known[position] = states[a]
            position += 1  # by hand: this is asked more often than anything else
        for v in e.results:
            if v in states:
                known[position] = states[v]
            position += 1
        return known

    def candidates(self, i: int) -> list[Match]:
        e = self.body.equations[i]
        found = self.allows(self.body, e, self.view(i))
        return [m for m in found if all(self.allowed(a, s) for a, s in zip(e.operands, m.operands, strict=True))]

    def allowed(self, atom: Atom, state: State) -> bool:
        if isinstance(atom, Literal):
            return state == REPLICATED or (state == PARTIAL and atom.zero)
        if state != PARTIAL or atom in self.states or atom in self.body.inputs:
            return True
        return atom not in self.constants.constant or atom in self.constants.zero

    def visit(self, i: int, default: bool = False) -> None:
        if self.matches[i] is not None:
            self.check(i)
            return
        found = self.candidates(i)
        if not found:
            partial = self.partial_operand(i)
            raise Conflict(self.partial_result(i) if partial is None else partial)
        if not default and (len(found) > 1 or self.may_reduce(i)):
            return
        self.take(i, found[-1] if default and found[-1].name == "replicated" else found[0])

    def take(self, i: int, match: Match) -> None:
        e = self.body.equations[i]
        self.matches[i] = match
        if match.reduction not in ("", "sum"):
            if not all(stopped(self.body, v) for v in e.results):
                raise Unmatched
            self.reduced.update((v, match.reduction) for v in e.results)
        for a, s in zip(e.operands, match.operands, strict=True):
            if isinstance(a, int) and a not in self.reduced:
                self.set(a, s)
        for v, s in zip(e.results, match.results, strict=True):
            self.set(v, s)

    def check(self, i: int) -> None:
        """Whether what is known around a settled equation is still what it chose: asked whenever a state near it is set."""
        match, e, states, reduced = self.matches[i], self.body.equations[i], self.states, self.reduced
        assert match is not None
        for a, s in zip(e.operands, match.operands, strict=True):
            if isinstance(a, int):
                seen = REPLICATED if a in reduced else states.get(a, s)
                if seen is not s and seen != s:
                    raise Conflict(self.partial_operand(i))
        for v, s in zip(e.results, match.results, strict=True):
            seen = states.get(v, s)
            if seen is not s and seen != s:
                raise Conflict(self.partial_operand(i))

    def partial_operand(self, i: int) -> int | None:
        """A partial operand that could be reduced before this equation."""
        operands = self.body.equations[i].operands
        partial = (a for a in operands if isinstance(a, int) and a not in self.reduced and self.states.get(a) == PARTIAL)
        return next(partial, None)

    def may_reduce(self, i: int) -> bool:
        """Whether a result that users want whole could still be a partial one, reduced: not all operands are known yet."""
        e, known = self.body.equations[i], self.view(i)
        n = len(e.operands)
        if all(p in known for p, a in enumerate(e.operands) if isinstance(a, int)) or REPLICATED not in known.values():
            return False
        operands = {p: s for p, s in known.items() if p < n}
        return any(PARTIAL in m.results and m.divided for m in self.allows(self.body, e, operands))

    def partial_result(self, i: int) -> int | None:
        """A result that this equation makes partial, although its users were seen to need it whole."""
        e = self.body.equations[i]
        known = {p: s for p, s in self.view(i).items() if p < len(e.operands)}
        for match in self.allows(self.body, e, known) if known else ():
            for v, s in zip(e.results, match.results, strict=True):
                if s == PARTIAL and self.states.get(v) == REPLICATED:
                    return v
        return None

    def spread(self) -> None:
        while self.queue or self.later:
            if not self.queue:
                first = min(self.later)
                self.later.remove(first)
                self.visit(first)
                continue
            i = self.queue.pop()
            if self.matches[i] is None and self.body.equations[i].name in NESTING:
                self.later.add(i)
            else:
                self.visit(i)

    def run(self) -> Solution:
        self.spread()
        for i, match in enumerate(self.matches):  # those before i stay settled
            if match is None:
                self.visit(i, default=True)
                self.spread()
        for v in self.body.inputs:
            self.states.setdefault(v, REPLICATED)
        operands = tuple(self.states[v] for v in self.body.inputs)
        if any(v in self.reduced for v in self.body.inputs):
            raise Unmatched
        results = tuple(self.output(a) for a in self.body.outputs)
        return Solution(self.states, self.reduced, tuple(m for m in self.matches if m), operands, results)

    def output(self, atom: Atom) -> State:
        """A reduced output is the same on every device and JAX knows it: unused."""
        if isinstance(atom, Literal) or atom in self.reduced:
            return UNUSED
        return self.states[atom]


PASSING = frozenset(
    {"max", "broadcast_in_dim", "reshape", "convert_element_type", "select_n", "squeeze", "expand_dims", "is_finite"}
)


def stopped(body: Body, variable: int) -> bool:
    """Whether no gradient flows back through a variable: a maximum over devices has none (ties would be counted twice)."""
    if not body.tensors[variable].floating:
        return True
    if variable in body.outputs:
        return False
    users = [e for e in body.equations if variable in e.operands]
    return all(e.name == "stop_gradient" or _passes_none(body, e) for e in users)


def _passes_none(body: Body, equation: Equation) -> bool:
    """Whether no gradient of its results flows through an equation."""
    results = equation.results
    discrete = not any(body.tensors[v].floating for v in results)  # such as a comparison's
    return discrete or (equation.name in PASSING and all(stopped(body, v) for v in results))


@dataclass(frozen=True)
class Constants:
    """Variables that are zero whatever the inputs, and those that depend on no input."""

    zero: frozenset[int]
    constant: frozenset[int]


CONSTANTS: dict[int, tuple[Body, Constants]] = {}  # by identity: asked for at every propagation


def constants(body: Body) -> Constants:
    """Zeros may stand in a sum over devices; another constant is not the sum of its copies."""
    found = CONSTANTS.get(id(body))
    if found is None or found[0] is not body:
        zero: set[int] = set()
        constant: set[int] = set()
        for e in body.equations:
            if all(isinstance(a, Literal) or a in constant for a in e.operands):
                constant.update(e.results)
            if e.name in ("broadcast_in_dim", "convert_element_type", "reshape") and all(
                a.zero if isinstance(a, Literal) else a in zero for a in e.operands
            ):
                zero.update(v for v in e.results if body.tensors[v].floating)
        found = CONSTANTS[id(body)] = (body, Constants(frozenset(zero), frozenset(constant)))
    return found[1]
