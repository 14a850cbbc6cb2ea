"""Placement of all variables of an operator's body, derived from the types of its operands and results."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from unity.pcg.ir.program import Body, Literal
from unity.pcg.propagation.propagation import Unmatched, contributions
from unity.pcg.propagation.solver import Solution, solve_either
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, Type

Placing = tuple[Solution | None, ...]  # one for each axis; None: every variable is unused


def around_scatter(placing: Placing, variable: int) -> tuple[Type, Type] | None:
    """Return the types of a variable before and after it is reduced, if it is scattered along an axis; otherwise None."""
    if not any(s is not None and variable in s.scattered for s in placing):
        return None
    before, after = zip(*((UNUSED, UNUSED) if s is None else s.around_reduction(variable) for s in placing), strict=True)
    return before, after


@lru_cache(maxsize=65536)
def placing(body: Body, operands: tuple[Type, ...], results: tuple[Type, ...], n_axes: int) -> Placing:
    """Return the solution along each axis. Raises Unmatched if the operator cannot have these types."""
    return tuple(along_axis(body, tuple(t[k] for t in operands), tuple(t[k] for t in results)) for k in range(n_axes))


@lru_cache(maxsize=65536)
def along_axis(body: Body, operands: tuple[State, ...], results: tuple[State, ...]) -> Solution | None:
    """Return the solution along one axis with these boundary states; None if the axis is unused.

    Raises Unmatched if the body cannot have these states.
    """
    states = operands + results
    if all(s == UNUSED for s in states):
        return None
    if all(s == REPLICATED for s in states):
        return Solution(dict.fromkeys(body.tensors, REPLICATED), {}, (), operands, results)
    known = {v: REPLICATED if s == UNUSED else s for v, s in zip(body.inputs, operands, strict=True)}
    known |= {a: s for a, s in zip(body.outputs, results, strict=True) if isinstance(a, int) and s != UNUSED}
    solution = solve_either(body, known)
    boundary = zip(body.outputs, results, solution.results, strict=True)
    whole = {a: REPLICATED for a, s, t in boundary if isinstance(a, int) and s == UNUSED and t == PARTIAL}
    if whole:
        other = solve_either(body, known | whole)
        solution = solution if any(a in other.reduced for a in whole) else other  # an operator never reduces its own results
    return _with_unused(body, solution, operands, results)


def _with_unused(body: Body, solution: Solution, operands: tuple[State, ...], results: tuple[State, ...]) -> Solution:
    """Return a solution with unused operands and results where the boundary states require them.

    Values that lead to these results alone are computed alike on every device, as are smaller values of unused operands, which are
    replicated where others read them. Raises Unmatched if nothing is computed alike from an unused operand.
    """
    unused_inputs = frozenset(v for v, s in zip(body.inputs, operands, strict=True) if s == UNUSED)
    targets = [a for a, s in zip(body.outputs, results, strict=True) if s == UNUSED and isinstance(a, int)]
    targets += contributions(body, solution)
    alike = _computable_alike(body, solution, unused_inputs)
    unused = frozenset(_producing(body, solution, alike.intersection(targets)))
    if not unused_inputs <= unused:
        unused |= frozenset(_producing(body, solution, _shrunk(body, alike, unused_inputs - unused)))
    if not unused_inputs <= unused:
        raise Unmatched

    def result_state(k: int, state: State) -> State:
        if state == UNUSED:  # a value that is the same on every device may be called replicated, too
            return REPLICATED if results[k] == REPLICATED else UNUSED
        return UNUSED if body.outputs[k] in unused and results[k] != REPLICATED else state

    result_states = tuple(result_state(k, state) for k, state in enumerate(solution.results))
    return replace(solution, operands=operands, results=result_states, unused=unused)


def with_unused(body: Body, solution: Solution) -> Iterator[Solution]:
    """Yield the solutions whose results and contributions to sums are unused wherever possible, and those whose operands are.

    The operands from which the former are computed become unused, too; the latter's are those from which smaller values are
    computed alike.
    """
    inputs = frozenset(v for v in body.inputs if solution.states[v] == REPLICATED)
    alike = _computable_alike(body, solution, inputs)
    targets = [a for a in (*body.outputs, *contributions(body, solution)) if isinstance(a, int) and a in alike]
    unused = frozenset(_producing(body, solution, targets))
    shrunk = frozenset(_producing(body, solution, _shrunk(body, alike, inputs)))
    for inside, ends in dict.fromkeys([(unused, unused), (unused | shrunk, unused)]):
        operands = tuple(UNUSED if a in inside else s for a, s in zip(body.inputs, solution.operands, strict=True))
        results = tuple(UNUSED if a in ends else s for a, s in zip(body.outputs, solution.results, strict=True))
        if inside and (operands, results) != (solution.operands, solution.results):
            with suppress(Unmatched):
                other = along_axis(body, operands, results)  # the running program is derived from the boundary states
                if other is not None:
                    yield other


def _shrunk(body: Body, alike: Collection[int], inputs: Collection[int]) -> set[int]:
    """Return the variables that are computed alike from inputs and are at most as large as the operands they are computed from."""

    def nbytes(variables: Iterable[int]) -> int:
        return sum(body.tensors[v].nbytes for v in variables)

    shrunk = set[int]()
    for e in body.equations:
        operands = {a for a in e.operands if isinstance(a, int)}
        sources = operands.intersection(inputs) | operands.intersection(shrunk)
        if sources and {*e.results, *operands} <= set(alike) and nbytes(e.results) <= nbytes(sources):
            shrunk.update(e.results)
    return shrunk


def _computable_alike(body: Body, solution: Solution, inputs: Collection[int]) -> set[int]:
    """Return the variables that can be computed alike on every device, from reduced values and these inputs."""
    alike = {*solution.reduced, *inputs}
    for e, match in zip(body.equations, solution.matches, strict=True):
        if all(s == REPLICATED for s in match.states) and all(isinstance(a, Literal) or a in alike for a in e.operands):
            alike.update(e.results)
    return alike


def _producing(body: Body, solution: Solution, targets: Collection[int]) -> Iterator[int]:
    """Yield variables and those from which they are computed after the last reduce."""
    needed = set(targets).difference(solution.reduced)
    for e in reversed(body.equations):
        if not needed.isdisjoint(e.results):
            needed.update(e.results)
            needed.update(a for a in e.operands if isinstance(a, int) and a not in solution.reduced)
    yield from needed
