"""Propagation of states through a body: from known states to all that follow from them, one equation at a time.

If a partial sum reaches an operator that is not linear, a Reduce is inserted inside the body; a soft-max over a partitioned
dimension needs two small ones. A sum of several operands that are partial sums may be scattered instead. Nothing else communicates
inside. A whole value that is added to a partial sum may be contributed by one device. The caller (`solver`) provides the matches of
each equation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

from unity.pcg.ir.dead_code import ancestors
from unity.pcg.ir.differentiable_dependence import differentiated
from unity.pcg.ir.gradient_flow import carrying, wanted_by
from unity.pcg.ir.program import Atom, Body, Equation, Literal
from unity.pcg.jaxprs.jaxprs import NESTING
from unity.pcg.propagation.constants import constants, literal_may_be
from unity.pcg.types.factors import Match
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State

Place = tuple[int, int]  # an equation, by number, and one of its operands
Matches = Callable[[Body, Equation, Mapping[int, State]], Sequence[Match]]  # the matches of an equation with known states
Around = tuple[State | None, ...]  # the states of an equation's operands as it sees them, then of its results as it produces them


@dataclass(frozen=True)
class Solution:
    """The states of a body's variables along one axis.

    A reduced value is the same on every device, as is any value that is computed from such values alone. Other equations see both
    kinds as replicated for use (`users`).

    Attributes:
        states: of each variable, as its equation produces it.
        reduced: the reduction ("sum", "max", ...) of each variable that is produced partial and reduced at once.
        scattered: the state in which users see each variable that is produced as a partial sum and reduce-scattered at once, or in
            slices that are moved or gathered (`placement.waists`).
        matches: one for each equation.
        operands, results: the boundary states.
        unused: the variables that every device computes alike.
        contributed: operands that are produced whole, but are partial sums to their equation.
        open: states by variable that would have been possible where nothing determined a choice and the first was taken.
        contributed_results: results of a derivative rule, by number, that are computed whole, but are partial sums outside of it.
    """

    states: Mapping[int, State]
    reduced: Mapping[int, str]
    matches: tuple[Match, ...]
    operands: tuple[State, ...]
    results: tuple[State, ...]
    unused: frozenset[int] = frozenset()
    contributed: frozenset[Place] = frozenset()
    open: tuple[Mapping[int, State], ...] = ()
    scattered: Mapping[int, State] = field(default_factory=dict[int, State])
    contributed_results: frozenset[int] = frozenset()

    @property
    def communicates(self) -> bool:
        """Whether devices along the axis communicate, or read their index along it, while the body or its derivative runs.

        They do for a sum inside the body, a value replicated or contributed there, a halo, or an agreement in a nested program.
        """
        return self.changes or any(match.communicates for match in self.matches)

    @property
    def changes(self) -> bool:
        """Whether any value inside the body, or a result, changes its state where it is produced or read."""
        return bool(self.reduced or self.scattered or self.contributed or self.contributed_results or self.unused)

    def seen(self, variable: int) -> State:
        """Return the state of a variable as later equations see it."""
        state = self.scattered.get(variable, self.states[variable])
        return REPLICATED if variable in self.reduced or state == UNUSED else state

    def around_reduction(self, variable: int) -> tuple[State, State]:
        """Return the states of a variable as it is produced, and after it is reduced or scattered, before it is replicated.

        A variable of which devices take the maximum, or anything but the sum, counts as produced when they have it.
        """
        if self.reduced.get(variable, "sum") != "sum":
            return UNUSED, UNUSED
        before = UNUSED if variable in self.unused else self.states[variable]
        return before, UNUSED if variable in self.reduced else self.scattered.get(variable, before)

    def replicates(self, body: Body, variable: int, user: int) -> bool:
        """Return whether a user sees a variable as replicated for use that every device computes alike.

        Args:
            body: the body of this solution.
            variable: one of its variables.
            user: the number of an equation, or -1 - k for the body's result k.
        """
        if variable not in self.reduced and variable not in self.unused and self.scattered.get(variable) != UNUSED:
            return False
        if user < 0:
            return self.results[-1 - user] != UNUSED
        e = body.equations[user]
        contributed = any(a == variable and (user, p) in self.contributed for p, a in enumerate(e.operands) if self.contributed)
        return not contributed and not self.repeats(e)

    def repeats(self, equation: Equation) -> bool:
        """Return whether every device computes an equation alike, from operands that are the same on every device."""
        return bool(self.unused) and not self.unused.isdisjoint(equation.results)

    def users(self, body: Body) -> dict[int, tuple[int, ...]]:
        """Return for every variable that all devices compute alike the users that see it as replicated for use.

        Those without a derivative in it, such as comparisons, are left out: no cotangent of theirs is summed.
        """
        gathered = (v for v, s in self.scattered.items() if s == UNUSED)
        shared = sorted({*self.reduced, *self.unused, *gathered})
        users_of = _differentiated_users(body) if shared else {}
        return {v: tuple(u for u in users_of.get(v, ()) if self.replicates(body, v, u)) for v in shared}


@lru_cache(maxsize=4096)
def _differentiated_users(body: Body) -> Mapping[int, Sequence[int]]:
    """Return for each variable of a body its users with a derivative in it, as `Solution.replicates` numbers them."""
    users: dict[int, list[int]] = {}
    for k, e in enumerate(body.equations):
        for a in dict.fromkeys(differentiated(e)):
            users.setdefault(a, []).append(k)
    for k, a in enumerate(body.outputs):
        if isinstance(a, int):
            users.setdefault(a, []).append(-1 - k)
    return users


def contributions(body: Body, solution: Solution) -> list[int]:
    """Return the variables that one device contributes to partial sums."""
    atoms = (body.equations[i].operands[p] for i, p in sorted(solution.contributed))
    return [a for a in atoms if isinstance(a, int)]


def cancels(body: Body, solution: Solution) -> bool:
    """Return whether one device contributes a value to partial sums that it was computed from.

    `x - max(x)` is at most 0 where `x` was added up before. Of partial sums of `x`, it is the rounding of the summands.
    """
    return any(not sums.isdisjoint(ancestors(body, [a])) for a, sums in _contributed_sums(body, solution))


def contribution_operands(body: Body, solution: Solution) -> frozenset[tuple[int, int]]:
    """Return the pairs of a body's operands such that a value computed from the first is contributed to sums of the second."""
    pairs = [(ancestors(body, [a]), sums) for a, sums in _contributed_sums(body, solution)]
    numbers = tuple(enumerate(body.inputs))
    return frozenset((p, q) for above, sums in pairs for p, v in numbers if v in above for q, w in numbers if w in sums)


def _contributed_sums(body: Body, solution: Solution) -> Iterator[tuple[int, frozenset[int]]]:
    """Yield each contributed variable, with the variables whose partial sums are in the sum that it is contributed to."""

    def partial(i: int) -> list[int]:
        operands = zip(body.equations[i].operands, solution.matches[i].operands, strict=True)
        summed = [a for p, (a, s) in enumerate(operands) if s == PARTIAL and (i, p) not in solution.contributed]
        return [a for a in summed if isinstance(a, int)]

    for i, p in sorted(solution.contributed):
        variable, sums = body.equations[i].operands[p], set(partial(i))
        for k in reversed(range(i)):
            if not sums.isdisjoint(body.equations[k].results):
                sums.update(partial(k))
        if isinstance(variable, int):
            yield variable, frozenset(sums)


def rounded_apart(body: Body, solution: Solution) -> frozenset[int]:
    """Return the variables of which each device would round a cotangent that is a partial sum.

    Every device has to compute them alike, so that cotangents are added up before.
    """
    if not any(match.rounds for match in solution.matches):  # nearly always
        return frozenset()
    flow = carrying(body, tuple(body.tensors[v].floating for v in body.inputs), (True,) * len(body.outputs))
    rounding = (e for e, match in zip(body.equations, solution.matches, strict=True) if match.rounds and e.name != "while")
    return flow.intersection(v for e in rounding for v in e.results) - solution.unused


class Conflict(Exception):
    """No match of an equation agrees with the states around it.

    Attributes:
        variable: a partial value that could be reduced first, if there is one.
        places: operands that could be contributed.
        summed: whether a result of the equation must be a partial sum, or an input is one that could be contributed to a sum.
    """

    def __init__(self, variable: int | None, places: Iterable[Place] = (), summed: bool = False) -> None:
        self.variable, self.places, self.summed = variable, frozenset(places), summed


class Unmatched(Exception):
    """A body has no solution with the given states.

    Attributes:
        contributing: whether it may have one that contributes whole values to sums.
        hasty: whether an operand was assumed to be whole, beside a partial sum, before its state was known.
    """

    def __init__(self, contributing: bool = False, hasty: bool = False) -> None:
        self.contributing, self.hasty = contributing, hasty


@dataclass(frozen=True)
class Possibilities:
    """The matches that an equation may still have, given the states around it.

    Attributes:
        matches: its matches that agree with these states.
        may_reduce: whether a result that users need whole could still be produced partial and reduced, as operands are unknown.
    """

    matches: Sequence[Match]
    may_reduce: bool


@lru_cache(maxsize=256)
def _memo(body: Body) -> Sequence[dict[Around, Possibilities]]:
    """Return a memo of the possibilities of each equation of a body.

    The choices of a body take hundreds of propagations through it, which meet the same states again and again. Few bodies are
    propagated through at a time, so the memos of others are dropped.
    """
    return [{} for _ in body.equations]


class Propagation:
    """A worklist algorithm that extends known states through a body until every equation has a match."""

    def __init__(
        self,
        body: Body,
        known: Mapping[int, State],
        reduced: Mapping[int, str],
        matches_of: Matches,
        contributed: Collection[Place] | None = None,
        scattered: Mapping[int, State] | None = None,
        patient: bool = False,
        undifferentiated: bool = False,
    ) -> None:
        """Start from known states.

        Args:
            body: the body to solve.
            known: states by variable.
            reduced: the reductions of variables that are reduced where they are produced.
            matches_of: returns the matches of an equation.
            contributed: operands that are contributed to partial sums; None if none may be.
            scattered: the states in which users see variables that are reduce-scattered where they are produced; None if none may
                be.
            patient: visit equations that read a partial sum beside an operand in an unknown state last.
            undifferentiated: whether no gradient flows through the body.
        """
        self.patient, self.hasty, self.undifferentiated = patient, False, undifferentiated
        self.body, self.known, self.reduced, self.matches_of = body, known, dict(reduced), matches_of
        self.scattering, self.scattered = scattered is not None, dict(scattered or {})
        self.seen: dict[int, State] = self.scattered | dict.fromkeys(reduced, REPLICATED)  # by users, if not as produced
        self.contributing, self.contributed = contributed is not None, frozenset(contributed or ())
        self.contributed_at: dict[int, list[int]] = {}  # positions by equation
        for i, p in self.contributed:
            self.contributed_at.setdefault(i, []).append(p)
        self.states: dict[int, State] = {}
        self.matches: list[Match | None] = [None] * len(body.equations)
        self.constants, self.memo = constants(body), _memo(body)
        self.queue: list[int] = []
        self.changed: set[int] = set()  # equations around which a state was set since they were visited
        self.open: list[Mapping[int, State]] = []  # states of the alternatives where the first match was taken
        self.deferred: set[int] = set()  # equations to visit when the most is known around them, as those with nested programs
        for v, s in known.items():
            self.set(v, s)

    def set(self, variable: int, state: State) -> None:
        """Set the state of a variable and queue the equations that touch it. Raises Conflict if it has another state."""
        old = self.states.get(variable)
        if old is None:
            self.states[variable] = state
            touching = self.body.touching.get(variable, ())
            self.queue += touching
            self.changed.update(touching)
        elif old is not state and old != state:
            raise Conflict(variable if PARTIAL in (old, state) else None)

    def around(self, i: int) -> Around:
        """Return the states around an equation, None for those that are unknown."""
        e, states, seen = self.body.equations[i], self.states, self.seen  # the innermost loop of propagation
        atoms = cast(Sequence[int], e.operands)  # a literal has no state
        around = [seen.get(a) or states.get(a) for a in atoms] + [states.get(v) for v in e.results]
        for p in self.contributed_at.get(i, ()):
            around[p] = PARTIAL
        return tuple(around)

    def possibilities(self, i: int, known: Mapping[int, State]) -> Possibilities:
        """Return the possibilities of an equation with these known states around it."""
        e = self.body.equations[i]
        matches = self.matches_of(self.body, e, known)
        if any(known.get(p) == PARTIAL for p in range(len(e.operands), len(e.operands) + len(e.results))):
            matches = [m for m in matches if m.reduction in ("", "sum")]  # neither a maximum nor a truth value over devices
        literals = [(p, a) for p, a in enumerate(e.operands) if isinstance(a, Literal) and p not in known]  # known if contributed
        matches = [m for m in matches if all(literal_may_be(a, m.operands[p]) for p, a in literals)] if literals else matches
        return Possibilities(matches, self.may_reduce(i, known))

    def candidates(self, i: int, matches: Sequence[Match]) -> Sequence[Match]:
        """Return those matches of an equation in which the variables that depend on no input may be."""
        e = self.body.equations[i]
        operands = [(p, e.operands[p]) for p in self.constants.read[i] if (i, p) not in self.contributed]
        return [m for m in matches if all(self.may_be(a, m.operands[p]) for p, a in operands)] if operands else matches

    def may_be(self, atom: Atom, state: State) -> bool:
        """Return whether an atom can be in a state: of constants, only zeros can be partial sums."""
        if isinstance(atom, Literal):
            return literal_may_be(atom, state)
        if state != PARTIAL or atom in self.states or atom in self.body.inputs:
            return True
        return atom not in self.constants.constant or atom in self.constants.zero

    def visit(self, i: int, default: bool = False, deferred: bool = False) -> None:
        """Check an equation, or take a match of it if only one is left.

        Args:
            i: the number of the equation.
            default: take the first of several matches, or replicate if that is among them, and record the others as open.
            deferred: no other equation is queued, so that a state which the match assumes will not follow from another.
        """
        if self.matches[i] is not None:
            self.check(i)
            return
        around, memo = self.around(i), self.memo[i]
        possible = memo.get(around) or memo.setdefault(around, self.possibilities(i, _known(around)))
        candidates = self.candidates(i, possible.matches) if self.constants.read[i] else possible.matches
        if not candidates:
            known = _known(around)
            summed = any(self.states.get(v) == PARTIAL for v in self.body.equations[i].results)
            partial = (v for v in (self.partial_operand(i), self.partial_result(i, known)) if v is not None)
            smallest = min(partial, key=lambda v: self.body.tensors[v].nbytes, default=None)
            raise Conflict(smallest, self.contributable(i), summed or self.follows_partial(i))
        if not default and (
            len(candidates) > 1 or possible.may_reduce or (self.contributing and self.may_contribute(i, candidates[0]))
        ):
            return
        if not default and not deferred and _assumes_digit(candidates[0], around):
            self.deferred.add(i)
            return
        replicate = default and candidates[-1].name == "replicated"
        if not replicate:
            self.open += [dict(self.states_of(i, match)) for match in candidates[1:]]
        self.take(i, candidates[-1] if replicate else candidates[0])

    def take(self, i: int, match: Match) -> None:
        """Settle an equation on a match and set the states of its variables."""
        e = self.body.equations[i]
        self.matches[i] = match
        self.hasty = self.hasty or (PARTIAL in match.operands and self.assumes_whole(i, match))
        if match.reduction not in ("", "sum"):
            if not self.undifferentiated and not all(has_no_gradient(self.body, v) for v in e.results):
                raise Unmatched
            self.reduced.update((v, match.reduction) for v in e.results)
            self.seen.update((v, REPLICATED) for v in e.results)
            self.changed.update(k for v in e.results for k in self.body.touching.get(v, ()))
        for p, a in self.body.reads[i]:
            s = match.operands[p]
            if self.states.get(a) is not s and a not in self.seen and (i, p) not in self.contributed:
                self.set(a, s)
        for v, s in zip(e.results, match.results, strict=True):
            if self.states.get(v) is not s:
                self.set(v, s)
        self.changed.discard(i)

    def assumes_whole(self, i: int, match: Match) -> bool:
        """Return whether a match needs an operand whole whose state is unknown."""
        operands = zip(self.body.equations[i].operands, match.operands, strict=True)
        return any(s == REPLICATED and isinstance(a, int) and a not in self.states for a, s in operands)

    def awaits_operand(self, i: int) -> bool:
        """Return whether an equation reads a partial sum beside an operand whose state is unknown."""
        operands = [a for a in self.body.equations[i].operands if isinstance(a, int) and a not in self.seen]
        return any(self.states.get(a) == PARTIAL for a in operands) and any(a not in self.states for a in operands)

    def check(self, i: int) -> None:
        """Raise Conflict if a state around a settled equation contradicts its match. Runs whenever such a state is set."""
        match, e, states, seen = self.matches[i], self.body.equations[i], self.states, self.seen
        assert match is not None
        for p, a in self.body.reads[i]:
            if (i, p) not in self.contributed:
                s = match.operands[p]
                state = seen[a] if a in seen else states.get(a, s)
                if state is not s and state != s:
                    raise Conflict(self.partial_operand(i))
        for v, s in zip(e.results, match.results, strict=True):
            state = states.get(v, s)
            if state is not s and state != s:
                raise Conflict(self.partial_operand(i))

    def partial_operand(self, i: int) -> int | None:
        """Return a partial operand that could be reduced where it is produced: not an input of the body."""
        inner = (a for a in self.body.equations[i].operands if isinstance(a, int) and a not in self.body.inputs)
        return next((a for a in inner if a not in self.seen and self.states.get(a) == PARTIAL), None)

    def follows_partial(self, i: int) -> bool:
        """Return whether an input that this equation reads is a partial sum only because another equation needs it so."""
        partial = (a for a in self.body.equations[i].operands if isinstance(a, int) and self.states.get(a) == PARTIAL)
        return any(a in self.body.inputs and a not in self.known for a in partial)

    def contributable(self, i: int) -> Iterator[Place]:
        """Yield the whole operands of an equation that would have to be contributed to be added to its partial operands."""
        e, known = self.body.equations[i], _known(self.around(i))
        partial = {p: s for p, s in known.items() if s == PARTIAL}
        operands = range(len(e.operands))
        for match in self.matches_of(self.body, e, partial) if partial else ():
            others = [p for p in operands if p not in partial and match.operands[p] == PARTIAL]
            whole = [p for p in others if known.get(p) == REPLICATED or not self.may_be(e.operands[p], PARTIAL)]
            fits = all(known.get(p, s) == s for p, s in enumerate(match.states) if p not in whole)
            if match.results[0] == PARTIAL and fits and len(whole) < match.operands.count(PARTIAL):
                yield from ((i, p) for p in whole)

    def states_of(self, i: int, match: Match) -> Iterator[tuple[int, State]]:
        """Yield the variables of an equation with their states in a match of it."""
        e = self.body.equations[i]
        for p, (a, s) in enumerate(zip(e.operands, match.operands, strict=True)):
            if isinstance(a, int) and a not in self.seen and (i, p) not in self.contributed:
                yield a, s
        yield from zip(e.results, match.results, strict=True)

    def may_contribute(self, i: int, match: Match) -> bool:
        """Return whether a match needs a partial operand that may still be whole, for others that read it, and be contributed."""
        partial = (a for p, a in self.body.reads[i] if match.operands[p] == PARTIAL and a not in self.states)
        return any(a not in self.body.inputs or len(self.body.touching[a]) > 1 for a in partial)

    def may_reduce(self, i: int, known: Mapping[int, State]) -> bool:
        """Return whether a result that users need whole could still be produced partial and reduced, as operands are unknown."""
        if all(p in known for p, _ in self.body.reads[i]) or REPLICATED not in known.values():
            return False
        e = self.body.equations[i]
        operands = {p: s for p, s in known.items() if p < len(e.operands)}
        return any(PARTIAL in m.results and m.divided for m in self.matches_of(self.body, e, operands))

    def partial_result(self, i: int, known: Mapping[int, State]) -> int | None:
        """Return a result that this equation produces partial although its users need it whole, or a slice to be scattered."""
        e = self.body.equations[i]
        operands = {p: s for p, s in known.items() if p < len(e.operands)}
        for match in self.matches_of(self.body, e, operands) if operands else ():
            for v, s in zip(e.results, match.results, strict=True):
                state = self.states.get(v)
                if s == PARTIAL and state is not None and (state == REPLICATED or (self.scattering and state.kind == "P")):
                    return v
        return None

    def spread(self) -> None:
        """Visit queued equations until none is left, and those that are deferred last."""
        while self.queue or self.deferred:
            if not self.queue:
                first = min(self.deferred)
                self.deferred.remove(first)
                self.visit(first, deferred=True)
                continue
            i = self.queue.pop()
            if i not in self.changed:  # it is queued once for each variable, and was visited since
                continue
            self.changed.remove(i)
            if self.matches[i] is None and self.waits(i):
                self.deferred.add(i)
            else:
                self.visit(i)

    def waits(self, i: int) -> bool:
        """Return whether to visit an equation after all others that are queued."""
        return self.body.equations[i].name in NESTING or (self.patient and self.awaits_operand(i))

    def run(self) -> Solution:
        """Return the solution. Raises Conflict at an equation without a match, and Unmatched if an input would be reduced."""
        self.spread()
        for i, match in enumerate(self.matches):  # those before i stay settled
            if match is None:
                self.visit(i, default=True)
                self.spread()
        for v in self.body.inputs:
            self.states.setdefault(v, REPLICATED)
        operands = tuple(self.states[v] for v in self.body.inputs)
        if any(v in self.seen for v in self.body.inputs):
            raise Unmatched
        results = tuple(self.result_state(a) for a in self.body.outputs)
        matches = tuple(m for m in self.matches if m)
        return Solution(
            self.states,
            self.reduced,
            matches,
            operands,
            results,
            contributed=self.contributed,
            open=tuple(self.open),
            scattered=self.scattered,
        )

    def result_state(self, atom: Atom) -> State:
        """Return the state of a result of the body: unused if it is reduced, since JAX then knows that all devices have it."""
        if isinstance(atom, Literal) or atom in self.reduced:
            return UNUSED
        return self.states[atom]


def _known(around: Around) -> dict[int, State]:
    """Return the known ones of the states around an equation, by position."""
    return {p: s for p, s in enumerate(around) if s is not None}


def _assumes_digit(match: Match, around: Around) -> bool:
    """Return whether a match partitions a dimension though no known state around the equation does, so that its digit is a guess.

    The updates that a scatter adds to zeros may be sliced in any digit if all that is known is that their sum is partial.
    """
    return any(s.kind == "P" for s in match.states) and not any(s is not None and s.kind == "P" for s in around)


def has_no_gradient(body: Body, variable: int) -> bool:
    """Return whether no gradient flows back through a variable.

    Only then may devices reduce its maximum: a gradient would count ties across devices twice.
    """
    return variable not in wanted_by(body, (True,) * len(body.outputs))
