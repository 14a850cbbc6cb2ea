"""States spread through a body, from what is known to what follows. What each equation allows is said by `solve`.

Where a partial sum meets an operator that is not linear, a Reduce is put inside the body (a soft-max over a partitioned dimension
needs two small ones). No other communication happens inside. A whole value that is added to a partial sum may be contributed by one
device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unity.pcg.ir.gradient_flow import wanted_by
from unity.pcg.ir.program import Atom, Body, Equation, Literal
from unity.pcg.jaxprs.jaxprs import NESTING
from unity.pcg.types.factors import Match
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State

Place = tuple[int, int]  # an equation, by number, and one of its operands
Matches = Callable[[Body, Equation, Mapping[int, State]], Sequence[Match]]  # an equation's choices that agree with known states


@dataclass(frozen=True)
class Solution:
    """States of a body's variables along one axis. `reduced[v]`: v is partial where it is made and reduced at once.

    What is reduced is the same on every device, and so is what is computed of such values alone: in `unused` are those that are
    made so. Other equations find both kinds replicated for use (`users`). `contributed`: operands, by equation and position, that
    are whole where they are made and partial sums to this equation. `open`: what else could have been, where nothing said what.
    """

    states: Mapping[int, State]
    reduced: Mapping[int, str]
    matches: tuple[Match, ...]  # one for each equation
    operands: tuple[State, ...]
    results: tuple[State, ...]
    unused: frozenset[int] = frozenset()
    contributed: frozenset[Place] = frozenset()
    open: tuple[Mapping[int, State], ...] = ()

    @property
    def communicates(self) -> bool:
        """Whether devices along the axis communicate, or ask for their place along it, while the body or its derivative runs.

        They do for a reduce inside of the body, a value replicated or contributed there, a halo, or an agreement in a nested
        program.
        """
        inside = self.reduced or self.contributed or self.unused
        return bool(inside) or any(match.communicates for match in self.matches)

    def seen(self, variable: int) -> State:
        """The state in which later equations find a variable."""
        return REPLICATED if variable in self.reduced else self.states[variable]

    def replicates(self, body: Body, variable: int, user: int) -> bool:
        """Whether a user of a variable (an equation by number, a result k as -1 - k) finds it replicated for use, though it is made
        the same on every device."""
        if variable not in self.reduced and variable not in self.unused:
            return False
        if user < 0:
            return self.results[-1 - user] != UNUSED
        e = body.equations[user]
        given = any(a == variable and (user, p) in self.contributed for p, a in enumerate(e.operands) if self.contributed)
        return not given and not self.repeats(e)

    def repeats(self, equation: Equation) -> bool:
        """Whether every device does the same at an equation, with what is the same on every device."""
        return bool(self.unused) and not self.unused.isdisjoint(equation.results)

    def users(self, body: Body) -> dict[int, tuple[int, ...]]:
        """The users that find a variable replicated for use, of every variable that is made the same on every device."""
        found: dict[int, list[int]] = {v: [] for v in (*self.reduced, *self.unused)}
        uses = [(a, k) for k, e in enumerate(body.equations) for a in dict.fromkeys(e.operands) if isinstance(a, int)]
        uses += [(a, -1 - k) for k, a in enumerate(body.outputs) if isinstance(a, int)]
        for a, user in uses:
            if self.replicates(body, a, user):
                found[a].append(user)
        return {v: tuple(some) for v, some in sorted(found.items())}


class Conflict(Exception):
    """No choice of an equation agrees with the states around it; `variable` could be reduced first, or what is at these `places`
    contributed. `summed`: it is to make a partial sum."""

    def __init__(self, variable: int | None, places: Iterable[Place] = (), summed: bool = False) -> None:
        self.variable, self.places, self.summed = variable, frozenset(places), summed


class Unmatched(Exception):
    """The whole body has no solution with these states; `contributing`: it may have one with whole values contributed to sums."""

    def __init__(self, contributing: bool = False) -> None:
        self.contributing = contributing


class Propagation:
    """States spread from what is known to what follows, equation by equation, until nothing is open."""

    def __init__(
        self,
        body: Body,
        known: Mapping[int, State],
        reduced: Mapping[int, str],
        allows: Matches,
        contributed: Collection[Place] | None = None,
    ) -> None:
        """`contributed`: None where nothing may be."""
        self.body, self.reduced, self.allows = body, dict(reduced), allows
        self.contributing, self.contributed = contributed is not None, frozenset(contributed or ())
        self.states: dict[int, State] = {}
        self.matches: list[Match | None] = [None] * len(body.equations)
        self.constants = constants(body)
        self.queue: list[int] = []
        self.open: list[Mapping[int, State]] = []  # what other choices would have been where the first was taken
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
        if self.contributed:
            known.update((p, PARTIAL) for p in range(len(e.operands)) if (i, p) in self.contributed)
        return known

    def candidates(self, i: int) -> list[Match]:
        e = self.body.equations[i]
        found = self.allows(self.body, e, self.view(i))
        operands = [(p, a) for p, a in enumerate(e.operands) if (i, p) not in self.contributed]
        return [m for m in found if all(self.allowed(a, m.operands[p]) for p, a in operands)]

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
            summed = any(self.states.get(v) == PARTIAL for v in self.body.equations[i].results)
            raise Conflict(self.partial_result(i) if partial is None else partial, self.beside(i), summed)
        if not default and (len(found) > 1 or self.may_reduce(i) or self.may_contribute(i, found[0])):
            return
        whole = default and found[-1].name == "replicated"
        if not whole:
            self.open += [dict(self.ends(i, match)) for match in found[1:]]
        self.take(i, found[-1] if whole else found[0])

    def take(self, i: int, match: Match) -> None:
        e = self.body.equations[i]
        self.matches[i] = match
        if match.reduction not in ("", "sum"):
            if not all(stopped(self.body, v) for v in e.results):
                raise Unmatched
            self.reduced.update((v, match.reduction) for v in e.results)
        for p, (a, s) in enumerate(zip(e.operands, match.operands, strict=True)):
            if isinstance(a, int) and a not in self.reduced and (i, p) not in self.contributed:
                self.set(a, s)
        for v, s in zip(e.results, match.results, strict=True):
            self.set(v, s)

    def check(self, i: int) -> None:
        """Whether what is known around a settled equation is still what it chose: asked whenever a state near it is set."""
        match, e, states, reduced = self.matches[i], self.body.equations[i], self.states, self.reduced
        assert match is not None
        for p, (a, s) in enumerate(zip(e.operands, match.operands, strict=True)):
            if isinstance(a, int) and (i, p) not in self.contributed:
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

    def beside(self, i: int) -> Iterator[Place]:
        """The operands of an equation that are whole beside partial sums, and would have to be contributed to be added to them."""
        e, known = self.body.equations[i], self.view(i)
        partial = {p: s for p, s in known.items() if s == PARTIAL}
        operands = range(len(e.operands))
        for match in self.allows(self.body, e, partial) if partial else ():
            others = [p for p in operands if p not in partial and match.operands[p] == PARTIAL]
            whole = [p for p in others if known.get(p) == REPLICATED or not self.allowed(e.operands[p], PARTIAL)]
            fits = all(known.get(p, s) == s for p, s in enumerate(match.states) if p not in whole)
            if match.results[0] == PARTIAL and fits and len(whole) < match.operands.count(PARTIAL):
                yield from ((i, p) for p in whole)

    def ends(self, i: int, match: Match) -> Iterator[tuple[int, State]]:
        """The states of the variables of an equation that a choice of it has."""
        e = self.body.equations[i]
        for p, (a, s) in enumerate(zip(e.operands, match.operands, strict=True)):
            if isinstance(a, int) and a not in self.reduced and (i, p) not in self.contributed:
                yield a, s
        yield from zip(e.results, match.results, strict=True)

    def may_contribute(self, i: int, match: Match) -> bool:
        """Whether a value that would have to be a partial sum may turn out to be whole where it is made, and be contributed."""
        made = ((a, s) for a, s in zip(self.body.equations[i].operands, match.operands, strict=True) if a not in self.body.inputs)
        return self.contributing and any(isinstance(a, int) and s == PARTIAL and self.states.get(a) is None for a, s in made)

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
        matches = tuple(m for m in self.matches if m)
        return Solution(self.states, self.reduced, matches, operands, results, contributed=self.contributed, open=tuple(self.open))

    def output(self, atom: Atom) -> State:
        """A reduced output is the same on every device and JAX knows it: unused."""
        if isinstance(atom, Literal) or atom in self.reduced:
            return UNUSED
        return self.states[atom]


def stopped(body: Body, variable: int) -> bool:
    """Whether no gradient flows back through a variable: a maximum over devices has none (ties would be counted twice)."""
    return variable not in wanted_by(body, (True,) * len(body.outputs))


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
