"""All choices of an operator: its legal parallelizations along one axis, derived from its body."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import inf

import jax.numpy as jnp
import numpy as np

from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.jaxprs.jaxprs import CALLS, NESTING
from unity.pcg.propagation.choice import Choice, InnerSlot, Scattered, choice_of, unused
from unity.pcg.propagation.dominance import Dominance
from unity.pcg.propagation.nested.agreements import forwarded_inputs
from unity.pcg.propagation.nested.programs import nested_body
from unity.pcg.propagation.placement import along_axis, around_moves, placed, waists, with_rounded_alike, with_unused
from unity.pcg.propagation.propagation import Solution, Unmatched, rounded_apart
from unity.pcg.propagation.solver import replicable, rounds_cotangents, scattering_dims, scattering_solution, solve, solve_either
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import Slot, facts_of
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, partitioned

MANY = 128  # solutions of a body up to which pairs are joined: k parts that are divided independently have 2 to the power of k

Seed = tuple[int, State]  # position (operands, then results) and the state wanted there


def choices(body: Body, seeds: Iterable[Seed] = ()) -> tuple[Choice, ...]:
    """Return all choices of an operator: unused, replicated, one for each factor, and one for each way to forward a partial sum.

    Args:
        seeds: further states, such as inner digits, that neighbours could use; the choices that have them are added.
    """
    return _choices(body, tuple(sorted(set(seeds))), 0)


def choices_with_moves(body: Body, seeds: Iterable[Seed] = (), users: int = 1) -> tuple[Choice, ...]:
    """Return all choices of an operator, and those that move a waist (`placement.waists`) inside.

    Args:
        seeds: as for `choices`.
        users: the number of operators that read a result, at most 2. Instead of the move, each could change the result's type.
    """
    return _choices(body, tuple(sorted(set(seeds))), users)


@lru_cache(maxsize=8192)
def _choices(body: Body, seeds: tuple[Seed, ...], users: int) -> tuple[Choice, ...]:
    """Return the choices for these seeds; without those that move a waist if `users` is 0."""
    if users and not waists(body):
        return _choices(body, seeds, 0)
    replicated = Choice("replicated", (REPLICATED,) * len(body.inputs), (REPLICATED,) * len(body.outputs), 0, 0.0)
    by_states = {c.states: c for c in (unused(body), replicated)}
    if not body.inputs or not replicable(body) or rounds_cotangents(body):
        by_states.pop(replicated.states, None)
    solution_of: dict[Choice, Solution] = {}
    dominance = Dominance(body)

    def offer(solution: Solution) -> bool:
        """Add a solution's choice unless others dominate it. Return whether to try it with unused operands or results."""
        choice = choice_of(body, solution)
        copies = users if choice.moves else 1
        if choice.states in by_states or (solution.changes and dominance.superfluous(choice, by_states.values(), copies)):
            return bool(solution.contributed)
        if rounded_apart(body, solution) or not _follows_from_ends(body, choice):
            return False
        by_states[choice.states] = choice
        solution_of[choice] = solution
        return True

    useful = [s for s in _solutions(body, seeds) if offer(s)]
    for solution in [other for s in useful for other in with_unused(body, s)]:
        offer(solution)
    for states in dict.fromkeys(around_moves(body, choices) if users else ()):
        if len(by_states) >= 2 * MANY:  # of independent parts, each may be moved whatever the others are
            break
        with suppress(Unmatched):
            solution = placed(body, *states)  # these boundary states may not need the move
            if solution is not None and solution.matches:
                offer(solution)
    return _with_inner_states(body, list(by_states.values()), solution_of)


def _follows_from_ends(body: Body, choice: Choice) -> bool:
    """Return whether a choice has the states that the running program, which is derived from its operands and results, has.

    A result that one solution reduces itself may be whole in another, of which it is computed after a reduction.
    """
    try:
        solution = placed(body, choice.operands, choice.results)
    except Unmatched:
        return False
    return solution is None or not solution.matches or (solution.operands, solution.results) == (choice.operands, choice.results)


def operand_states(body: Body) -> Iterator[tuple[State, ...]]:
    """Yield the operands' states of every choice that partitions some operand, lazily, so that a caller may stop early."""
    return (s.operands for s in _solutions(body, ()))


class _Solutions:
    """The solutions of a body that are known so far, without repetitions, and where to find those with given states.

    Attributes:
        items: the solutions, in the order in which they were found.
        results_of: the results' states of the solutions with given states of the operands.
    """

    def __init__(self) -> None:
        self.items: list[Solution] = []
        self.results_of: dict[tuple[State, ...], set[tuple[State, ...]]] = {}
        self._numbers: dict[tuple[int, State], int] = {}  # the solutions in which a variable has a state, as bits

    def add(self, solution: Solution) -> bool:
        """Add a solution unless one with its boundary states is known. Return whether it is new."""
        results = self.results_of.setdefault(solution.operands, set())
        if solution.results in results:
            return False
        results.add(solution.results)
        bit = 1 << len(self.items)
        self.items.append(solution)
        for place in solution.states.items():
            self._numbers[place] = self._numbers.get(place, 0) | bit
        return True

    def have(self, known: Mapping[int, State]) -> bool:
        """Return whether some solution has these states."""
        bits = (1 << len(self.items)) - 1
        for place in known.items():
            bits &= self._numbers.get(place, 0)
        return bool(bits)


def _solutions(body: Body, seeds: tuple[Seed, ...]) -> Iterator[Solution]:
    """Yield the distinct solutions that follow from every state that an equation of the body, or a neighbour, could have."""
    if any(facts_of(e.name).invariant for e in body.equations):
        return
    solutions = _Solutions()

    def extending(known: Mapping[int, State], contributing: bool = False) -> Iterator[Solution]:
        """Yield the new solutions with these states, including the alternatives where they leave a state open."""
        stack = [known]
        while stack:
            known = stack.pop()
            if solutions.have(known):
                continue
            try:
                first = solve(body, known, contributing=True) if contributing else solve_either(body, known)
            except Unmatched:
                continue
            stack += [{**known, **other} for other in first.open if all(known.get(v, s) == s for v, s in other.items())]
            if not _only_reduces_operands(body, first):
                yield from with_boundary(first.operands, first.results)

    def with_boundary(operands: tuple[State, ...], results: tuple[State, ...]) -> Iterator[Solution]:
        """Yield the solution with these boundary states if it is new: the running program is derived from them alone."""
        try:
            solution = along_axis(body, with_rounded_alike(body, operands, results), results)
        except Unmatched:
            return
        if solution is None or not solution.matches:  # it is unused or replicated after all
            return
        if not rounded_apart(body, solution) and solutions.add(solution):
            yield solution

    for known in _seeds(body, seeds):
        yield from extending(known)
    for known in _sums_of(body):
        yield from extending(known, contributing=True)
    for solution in tuple(solutions.items):
        for results in _with_partial_results(body, solution):
            yield from with_boundary(solution.operands, results)
        for known in _otherwise_whole(body, solution):
            yield from extending(known, contributing=PARTIAL in known.values())
        for operands, results in _scattering(body, solution):
            yield from with_boundary(operands, results)
    single = tuple(solutions.items)
    for a, b in _joinable_pairs(solutions):
        joined = list(zip(body.inputs, _joined_operands(a.operands, b.operands), strict=True))
        known = {v: s for v, s in joined if s == PARTIAL and (a.reduced or b.reduced)}
        known |= {v: s for v, s in joined if s.kind == "P"}  # last, since what is set last is followed first
        yield from extending(known)
        if a.reduced and b.reduced and a.results == b.results:
            yield from extending(known | {v: s for v, s in zip(body.outputs, a.results, strict=True) if isinstance(v, int)})
    for solution in single if len(solutions.items) >= MANY else ():
        states = zip(body.inputs, _joined_with_most(solution, single), strict=True)
        yield from extending({v: s for v, s in states if s.kind in "PS"})


def _only_reduces_operands(body: Body, solution: Solution) -> bool:
    """Return whether a solution divides nothing and reduces at least as many bytes as its partial operands have."""
    partial = [v for v, s in zip(body.inputs, solution.operands, strict=True) if s == PARTIAL]
    if not partial or not solution.reduced or any(s.kind == "P" for s in solution.operands):
        return False
    return sum(body.tensors[v].nbytes for v in solution.reduced) >= sum(body.tensors[v].nbytes for v in partial)


def _with_partial_results(body: Body, solution: Solution) -> Iterator[tuple[State, ...]]:
    """Yield a solution's results with one, or all, of the whole ones as partial sums, if it reduces a sum inside."""
    whole = [k for k, s in enumerate(solution.results) if s.kind in "UR" and isinstance(body.outputs[k], int)]
    whole = [k for k in whole if "sum" in solution.reduced.values() and body.tensor(body.outputs[k]).floating]
    for positions in dict.fromkeys([*((k,) for k in whole), tuple(whole)] if whole else ()):
        yield tuple(PARTIAL if k in positions else s for k, s in enumerate(solution.results))


def _otherwise_whole(body: Body, solution: Solution) -> Iterator[Mapping[int, State]]:
    """Yield states with which a solution that has partial results may have its partial sums elsewhere.

    If a partial sum inside is at most as large, it is reduced instead, and the results are whole. A value inside that is added to
    another partial sum may be whole and contributed: then all operands are whole but the partitioned ones, or but one partial one.
    """
    partial = [(a, s) for a, s in zip(body.outputs, solution.results, strict=True) if s == PARTIAL and isinstance(a, int)]
    results = [REPLICATED] if partial and _sums_less_inside(body, solution) else []
    results += [PARTIAL] if partial and _adds_inside(body, solution) else []
    if results:
        operands = list(zip(body.inputs, solution.operands, strict=True))
        sources = [{v: s for v, s in operands if s.kind == "P"}] + [{v: s} for v, s in operands if s == PARTIAL]
        for source, result in product(filter(None, sources), results):
            yield {v: source.get(v, REPLICATED) for v in body.inputs} | {a: result for a, _ in partial}


def _scattering(body: Body, solution: Solution) -> Iterator[tuple[tuple[State, ...], tuple[State, ...]]]:
    """Yield the boundary states with which sums of a solution's partial operands are scattered inside instead of reduced.

    Sums that are as large as their operands are scattered before the body instead, for as many bytes.
    """
    known = {v: s for v, s in zip(body.inputs, solution.operands, strict=True) if s == PARTIAL}
    before, inside = (sum(body.tensors[v].nbytes for v in variables) for variables in (known, solution.reduced))
    for dim in scattering_dims(body, known) if solution.reduced and inside < before else ():
        other = scattering_solution(body, tuple(known.items()), dim)
        if other is not None:
            yield other.operands, other.results


def _sums_less_inside(body: Body, solution: Solution) -> bool:
    """Return whether a partial sum inside is at most as large as the partial results together."""
    results = {a for a, s in zip(body.outputs, solution.results, strict=True) if s == PARTIAL and isinstance(a, int)}
    inner = (v for v, s in solution.states.items() if s == PARTIAL and v not in results and v not in body.inputs)
    return min((body.tensors[v].nbytes for v in inner), default=inf) <= sum(body.tensors[a].nbytes for a in results)


def _adds_inside(body: Body, solution: Solution) -> bool:
    """Return whether a value that is computed inside, or that others read, is added to another partial sum."""
    for e, match in zip(body.equations, solution.matches, strict=True):
        summands = [a for a, s in zip(e.operands, match.operands, strict=True) if s == PARTIAL and isinstance(a, int)]
        if len(set(summands)) > 1 and any(a not in body.inputs or len(body.touching[a]) > 1 for a in summands):
            return True
    return False


def _joinable_pairs(solutions: _Solutions) -> Iterator[tuple[Solution, Solution]]:
    """Yield pairs of solutions that may be joined: each partitions something that the other repeats.

    `solutions` may grow while the pairs are read; new ones are paired, too, until there are `MANY`.
    """
    k = 0
    while k < len(solutions.items):
        for j in range(k):
            if len(solutions.items) >= MANY:
                return
            a, b = solutions.items[j], solutions.items[k]
            joined = _joined_operands(a.operands, b.operands)
            results = solutions.results_of.get(joined, ()) if joined else ()
            if not joined or any(r == a.results or not (a.reduced and b.reduced) for r in results):
                continue
            if any(s.kind in "PS" for s in joined):
                yield a, b
        k += 1


def _joined_operands(a: tuple[State, ...], b: tuple[State, ...]) -> tuple[State, ...]:
    """Return the operands' states of two solutions joined, or an empty tuple if they contradict each other."""
    pairs = tuple(zip(_replicated(a), _replicated(b), strict=True))
    agree = all(s == t or REPLICATED in (s, t) for s, t in pairs)
    return tuple(t if s == REPLICATED else s for s, t in pairs) if agree else ()


def _replicated(states: tuple[State, ...]) -> tuple[State, ...]:
    """Return states with those of values replicated that only this solution needs unused (`with_rounded_alike`)."""
    return tuple(REPLICATED if s == UNUSED else s for s in states)


def _joined_with_most(solution: Solution, others: Collection[Solution]) -> tuple[State, ...]:
    """Return the operands' states of a solution joined with all others that do not contradict: first those in the same states."""
    alike = {*_replicated(solution.operands), REPLICATED}
    joined = _replicated(solution.operands)
    for other in sorted(others, key=lambda other: not alike.issuperset(_replicated(other.operands))):
        joined = _joined_operands(joined, other.operands) or joined
    return joined


def _seeds(body: Body, seeds: tuple[Seed, ...]) -> Iterator[Mapping[int, State]]:
    """Yield the states by variable to start from: each factor's, each partial input, and the given seeds."""
    for equation in body.equations:
        yield from _factor_seeds(body, equation)
    for v in _summable(body):
        yield {v: PARTIAL}
    boundary = (*body.inputs, *body.outputs)
    for position, state in seeds:
        atom = boundary[position]
        if isinstance(atom, int):
            yield {atom: state}


def _sums_of(body: Body) -> Iterator[Mapping[int, State]]:
    """Yield the states in which a partial input leads to partial results. Other summands of these may be contributed."""
    results = [a for a in body.outputs if isinstance(a, int) and a not in body.inputs and body.tensors[a].floating]
    for v in _summable(body) if len(body.equations) > 1 and results else ():
        yield dict.fromkeys([v, *results], PARTIAL)


def _summable(body: Body) -> list[int]:
    """Return the inputs that have a sum: truth values and keys have none."""
    return [v for v in body.inputs if jnp.issubdtype(body.tensors[v].dtype, np.number)]


def _factor_seeds(body: Body, equation: Equation) -> Iterator[Mapping[int, State]]:
    """Yield the states by variable of an axis on each factor of an equation."""
    spec = spec_of(body, equation)
    if spec is None:
        yield from _nested_seeds(body, equation)
        return
    for factor in spec.factors:
        operands, results = factor.states()
        places = zip((*equation.operands, *equation.results), factor.operands + factor.results, operands + results, strict=True)
        known = {a: s for a, place, s in places if isinstance(a, int) and isinstance(place, Slot)}
        if known:
            yield known


def _nested_seeds(body: Body, equation: Equation) -> Iterator[Mapping[int, State]]:
    """Yield the states by variable to try at an equation with nested programs."""
    if equation.name in CALLS:
        inner = nested_body(equation)
        for choice in choices(inner):
            states = zip((*equation.operands, *equation.results), choice.states, strict=True)
            known = {a: s for a, s in states if isinstance(a, int) and s.kind == "P"}
            if known:
                yield known
        passed = dict(zip(inner.inputs, equation.operands, strict=True))
        yield from _forwarded_seeds(body, [passed[v] for v in forwarded_inputs(inner)])
    else:  # control flow: every dimension of every operand is tried
        for a in equation.operands:
            if isinstance(a, int):
                for dim in range(body.tensors[a].ndim):
                    yield {a: partitioned(dim)}
        if equation.name == "cond":  # it may forward unrelated values, as checks for errors do
            yield from _together(body, equation.operands)


def _forwarded_seeds(body: Body, operands: Sequence[Atom]) -> Iterator[Mapping[int, State]]:
    """Yield each dimension of operands that a call forwards unchanged: of each operand alone, and of all that have it together.

    No equation of the call divides them, so they follow from no factor.
    """
    for together in _together(body, operands):
        yield from ({a: state} for a, state in together.items())
        yield together


def _together(body: Body, operands: Sequence[Atom]) -> Iterator[Mapping[int, State]]:
    """Yield for each dimension the state that partitions it in all operands that have it."""
    variables = [a for a in operands if isinstance(a, int)]
    for dim in range(max((body.tensors[a].ndim for a in variables), default=0)):
        yield {a: partitioned(dim) for a in variables if body.tensors[a].ndim > dim}


def _with_inner_states(body: Body, unmarked: list[Choice], solutions: Mapping[Choice, Solution]) -> tuple[Choice, ...]:
    """Return the choices with the variables that each partitions: reducing or keeping such a value costs less.

    They also get the states of all variables that any of them scatters, since a scatter's price depends on all axes.
    """
    changed = sorted({x.variable for c in unmarked for x in c.scattered})
    inner_slots = _inner_slots(body, [solutions.get(c) for c in unmarked])
    marked = []
    for c, slots in zip(unmarked, inner_slots, strict=True):
        solution = solutions.get(c)
        whole = UNUSED if solution is None and UNUSED in c.states else REPLICATED
        states = {} if solution is None else {**solution.states, **solution.scattered}
        split = frozenset(v for v, s in states.items() if s.kind == "P")
        around = ((whole, whole) if solution is None else solution.around_reduction(v) for v in changed)
        scattered = tuple(Scattered(v, *pair) for v, pair in zip(changed, around, strict=True))
        marked.append(replace(c, partitions=split, inner_slots=slots, scattered=scattered) if split or scattered or slots else c)
    return tuple(marked)


def _inner_slots(body: Body, solutions: Sequence[Solution | None]) -> list[tuple[InnerSlot, ...]]:
    """Return for each solution how it divides what is inside, once for what all solutions divide alike.

    Choices on several axes must divide it together. What they divide like an operand or a result is left out.
    """
    boundary = {*body.inputs, *(a for a in body.outputs if isinstance(a, int))}
    outside = {slots for v in boundary for slots in _slots_of_variable(body, v, solutions)}
    variables = (v for v in body.tensors if v not in boundary)
    programs = (k for k, e in enumerate(body.equations) if e.name in NESTING)
    inside = {slots: None for v in variables for slots in _slots_of_variable(body, v, solutions)}
    inside |= {slots: None for k in programs for slots in _slots_of_program(k, solutions)}
    own = [slots for slots in inside if slots not in outside]
    return list(zip(*own, strict=True)) if own else [()] * len(solutions)


def _slots_of_variable(body: Body, v: int, solutions: Sequence[Solution | None]) -> Iterator[tuple[InnerSlot, ...]]:
    """Yield how each solution divides a dimension of a variable, before and after it moves, for each that some solution divides."""
    before = [UNUSED if s is None else s.states.get(v, UNUSED) for s in solutions]
    after = [s if solution is None else solution.scattered.get(v, s) for solution, s in zip(solutions, before, strict=True)]
    for states in (after,) if before == after else (before, after):
        for dim in sorted({s.dim for s in states if s.kind == "P"}):
            size = body.tensors[v].shape[dim]
            yield tuple(InnerSlot(size, s.outer if s.kind == "P" and s.dim == dim else 0) for s in states)


def _slots_of_program(number: int, solutions: Sequence[Solution | None]) -> Iterator[tuple[InnerSlot, ...]]:
    """Yield which solutions divide the program of an equation in one way, for each way."""
    matches = [None if s is None or not s.matches else s.matches[number] for s in solutions]
    sizes = {match.states: match.size for match in matches if match is not None and match.size}
    for states, size in sizes.items():
        yield tuple(InnerSlot(size, int(match is not None and match.states == states)) for match in matches)
