"""Where every variable of an operator's body lies, given the types at its ends."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import lru_cache

from unity.pcg.ir.program import Body, Literal
from unity.pcg.propagation.propagation import Unmatched
from unity.pcg.propagation.solver import Solution, solve_either
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, Type

Placing = tuple[Solution | None, ...]  # one for each axis; None: unused by all


@lru_cache(maxsize=65536)
def placing(body: Body, operands: tuple[Type, ...], results: tuple[Type, ...], n_axes: int) -> Placing:
    """The states of all variables along each axis. Raises Unmatched where the operator cannot be parallelized so."""
    return tuple(along_axis(body, tuple(t[k] for t in operands), tuple(t[k] for t in results)) for k in range(n_axes))


@lru_cache(maxsize=65536)
def along_axis(body: Body, operands: tuple[State, ...], results: tuple[State, ...]) -> Solution | None:
    """The states of a body's variables along one axis, given those at its ends. None where the axis is unused."""
    states = operands + results
    if all(s == UNUSED for s in states):
        return None
    if all(s == REPLICATED for s in states):
        return Solution(dict.fromkeys(body.tensors, REPLICATED), {}, (), operands, results)
    known = {v: REPLICATED if s == UNUSED else s for v, s in zip(body.inputs, operands, strict=True)}
    ends = zip(body.outputs, results, strict=True)
    known |= {a: s for a, s in ends if isinstance(a, int) and s != UNUSED}
    solution = solve_either(body, known)
    summed = zip(body.outputs, results, solution.results, strict=True)
    whole = {a: REPLICATED for a, s, t in summed if isinstance(a, int) and s == UNUSED and t == PARTIAL}
    if whole:
        other = solve_either(body, known | whole)
        solution = solution if any(a in other.reduced for a in whole) else other  # an operator does not reduce what it gives
    return _with_unused(body, solution, operands, results)


def _with_unused(body: Body, solution: Solution, operands: tuple[State, ...], results: tuple[State, ...]) -> Solution:
    """A solution with unused operands and results where such are wanted: what leads to these results alone is made the same on
    every device. Raises Unmatched if operands are unused for nothing."""
    given = frozenset(v for v, s in zip(body.inputs, operands, strict=True) if s == UNUSED)
    wanted = [a for a, s in zip(body.outputs, results, strict=True) if s == UNUSED and isinstance(a, int)]
    wanted += contributions(body, solution)
    unused = frozenset(leading(body, solution, same(body, solution, given).intersection(wanted)))
    if not given <= unused:
        raise Unmatched

    def end(k: int, state: State) -> State:
        if state == UNUSED:  # what is the same on every device may be called replicated, too
            return REPLICATED if results[k] == REPLICATED else UNUSED
        return UNUSED if body.outputs[k] in unused else state

    ends = tuple(end(k, found) for k, found in enumerate(solution.results))
    return replace(solution, operands=operands, results=ends, unused=unused)


def with_unused(body: Body, solution: Solution) -> Solution | None:
    """The solution whose results, and what is contributed to sums, are unused where they can be, as are the operands that this
    takes. None if there is no such."""
    every = same(body, solution, frozenset(v for v in body.inputs if solution.states[v] == REPLICATED))
    ends = [a for a in (*body.outputs, *contributions(body, solution)) if isinstance(a, int) and a in every]
    unused = frozenset(leading(body, solution, ends))
    operands, results = (
        tuple(UNUSED if a in unused else s for a, s in zip(atoms, states, strict=True))
        for atoms, states in ((body.inputs, solution.operands), (body.outputs, solution.results))
    )
    if not unused or (operands, results) == (solution.operands, solution.results):
        return None
    try:
        return along_axis(body, operands, results)  # what will run is found from the ends
    except Unmatched:
        return None


def contributions(body: Body, solution: Solution) -> list[int]:
    """The variables that one device contributes to partial sums."""
    atoms = (body.equations[i].operands[p] for i, p in sorted(solution.contributed))
    return [a for a in atoms if isinstance(a, int)]


def same(body: Body, solution: Solution, given: Collection[int]) -> set[int]:
    """The variables that can be computed the same on every device: of what is reduced, and of these inputs."""
    alike = {*solution.reduced, *given}
    for e, match in zip(body.equations, solution.matches, strict=True):
        if all(s == REPLICATED for s in match.states) and all(isinstance(a, Literal) or a in alike for a in e.operands):
            alike.update(e.results)
    return alike


def leading(body: Body, solution: Solution, ends: Collection[int]) -> Iterator[int]:
    """Yields variables, and those they are computed from after the last reduce."""
    needed = set(ends).difference(solution.reduced)
    for e in reversed(body.equations):
        if not needed.isdisjoint(e.results):
            needed.update(e.results)
            needed.update(a for a in e.operands if isinstance(a, int) and a not in solution.reduced)
    yield from needed
