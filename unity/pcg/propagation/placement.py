"""Placement of all variables of an operator's body, derived from the types of its operands and results.

If the body has no solution with them, a *waist* inside is moved from one dimension to another, or gathered: a value that is smaller
than those from which it is computed. So an operator can be divided before it in one way, and after it in another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from unity.pcg.ir.program import Body, Literal
from unity.pcg.propagation.propagation import Solution, Unmatched, contributions, rounded_apart
from unity.pcg.propagation.solver import rounds_cotangents, solve_either
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, Type, partitioned, slice_count

LARGE = 8  # a waist is at most this factor smaller than the largest value; values smaller than the waist by more do not count
SHORT = 4  # waists in a chain, after which each must be computed from twice as many bytes as the last
NARROW = 1.5  # these values are together at least this factor larger than the waist

Placing = tuple[Solution | None, ...]  # one for each axis; None: every variable is unused


def around_scatter(placing: Placing, variable: int) -> tuple[Type, Type] | None:
    """Return the types of a variable before and after it is reduced, if it is scattered or moved along an axis; otherwise None."""
    if not any(s is not None and variable in s.scattered for s in placing):
        return None
    before, after = zip(*((UNUSED, UNUSED) if s is None else s.around_reduction(variable) for s in placing), strict=True)
    return before, after


def moved_waists(placing: Placing) -> frozenset[int]:
    """Return the variables inside a body that are moved to other slices, or gathered, along some axis."""
    return frozenset(v for s in placing if s is not None for v in s.scattered if s.states[v].kind == "P")


def moved_bytes(body: Body, placing: Placing, axes: Sequence[Axis]) -> float:
    """Return the bytes on one device of the waists that are moved inside a body: before the move, and after it."""
    around = ((v, around_scatter(placing, v)) for v in sorted(moved_waists(placing)))
    return sum(body.tensors[v].nbytes / slice_count(t, axes) for v, types in around for t in types or ())


@lru_cache(maxsize=65536)
def placing(body: Body, operands: tuple[Type, ...], results: tuple[Type, ...], n_axes: int) -> Placing:
    """Return the solution along each axis. Raises Unmatched if the operator cannot have these types."""
    return tuple(placed(body, tuple(t[k] for t in operands), tuple(t[k] for t in results)) for k in range(n_axes))


def placed(body: Body, operands: tuple[State, ...], results: tuple[State, ...]) -> Solution | None:
    """Return the solution of `along_axis` with these boundary states; where it has no solution, one in which a waist is moved.

    Raises Unmatched if the body cannot have these states even so.
    """
    try:
        solution = along_axis(body, operands, results)
    except Unmatched:
        return moved(body, operands, results)
    if solution is not None and solution.results != results and waists(body):
        with suppress(Unmatched):
            return moved(body, operands, results)
    return solution


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
    return _solution(body, operands, results)


def with_rounded_alike(body: Body, operands: tuple[State, ...], results: tuple[State, ...]) -> tuple[State, ...]:
    """Return the operands' states of a solution with those unused from which a value is computed whose cotangent is rounded.

    So every device computes it alike, and cotangents are added up before. Raises Unmatched without a solution.
    """
    if not rounds_cotangents(body):  # nearly always
        return operands
    solution = solve_either(body, _known(body, operands, results))
    whole = {v for v, s in zip(body.inputs, operands, strict=True) if s.kind in "RU"}
    rounded = rounded_apart(body, solution) & _computable_alike(body, solution, whole)
    alike = frozenset(_producing(body, solution, rounded))
    return tuple(UNUSED if v in alike and v in whole else s for v, s in zip(body.inputs, operands, strict=True))


def _known(body: Body, operands: Sequence[State], results: Sequence[State]) -> dict[int, State]:
    """Return the states by variable from which a solution with these boundary states follows."""
    known = {v: REPLICATED if s == UNUSED else s for v, s in zip(body.inputs, operands, strict=True)}
    return known | {a: s for a, s in zip(body.outputs, results, strict=True) if isinstance(a, int) and s != UNUSED}


def _solution(body: Body, operands: tuple[State, ...], results: tuple[State, ...]) -> Solution:
    """Return the solution with these boundary states, whatever they are, with a match for every equation."""
    known = _known(body, operands, results)
    solution = solve_either(body, known)
    boundary = zip(body.outputs, results, solution.results, strict=True)
    whole = {a: REPLICATED for a, s, t in boundary if isinstance(a, int) and s == UNUSED and t == PARTIAL}
    if whole:
        other = solve_either(body, known | whole)
        solution = solution if any(a in other.reduced for a in whole) else other  # an operator never reduces its own results
    return _with_unused(body, solution, operands, results)


@dataclass(frozen=True, eq=False)
class Waist:
    """A variable of a body that is smaller than the values from which it is computed, none of which is read elsewhere.

    Attributes:
        variable: the variable.
        above: the equations that compute it, by number.
        upper: these equations as a body.
        lower: the others as a body, whose first operand is the variable.
    """

    variable: int
    above: frozenset[int]
    upper: Body
    lower: Body

    def around(self, upper: Iterable[Any], lower: Iterable[Any]) -> dict[int, Any]:
        """Return the values of the operands of both parts, such as states, by variable."""
        return dict(zip((*self.upper.inputs, *self.lower.inputs), (*upper, *lower), strict=True))


@lru_cache(maxsize=8192)
def waists(body: Body) -> tuple[Waist, ...]:
    """Return the waists of a body, in the order of its equations: after one, only a value that is smaller again is another.

    In a long chain of waists, as a sum of many values has, most are left out: a body has a choice for any two states around each.
    """
    sizes = {v: t.nbytes for v, t in body.tensors.items()}
    producers = {v: i for i, e in enumerate(body.equations) for v in e.results}
    largest, chosen = max(sizes.values(), default=0), dict[int, Waist]()
    chains: dict[int, tuple[int, int]] = {}  # by waist: the number of waists up to it, and the bytes from which it is computed
    for e in body.equations[:-1]:
        v = e.results[0] if len(e.results) == 1 else None
        if v is None or v in body.outputs or LARGE * sizes[v] < largest:
            continue
        _, sources = _above(body, producers, v, chosen)
        if sum(sizes[a] for a in sources if LARGE * sizes[a] >= sizes[v]) >= NARROW * sizes[v]:
            above, inputs = _above(body, producers, v, ())
            length, last = max((chains[a] for a in sources if a in chains), default=(0, 0))
            read = sum(sizes[a] for a in inputs)
            if length >= SHORT and read < 2 * last:
                continue
            results = {a for i in above for a in body.equations[i].results}
            if _are_read_within(body, (inputs | results) - {v}, above):
                chosen[v], chains[v] = _waist(body, v, above, inputs), (length + 1, read)
    return tuple(chosen.values())


def _above(body: Body, producers: Mapping[int, int], variable: int, ends: Collection[int]) -> tuple[set[int], set[int]]:
    """Return the equations that compute a variable from inputs and from `ends`, and which of these they read."""
    above, sources, pending = set[int](), set[int](), [variable]
    while pending:
        a = pending.pop()
        if a not in producers or a in ends:
            sources.add(a)
        elif producers[a] not in above:
            above.add(producers[a])
            pending += [x for x in body.equations[producers[a]].operands if isinstance(x, int)]
    return above, sources


def _are_read_within(body: Body, variables: Iterable[int], numbers: Collection[int]) -> bool:
    """Return whether only these equations read some variables."""
    variables = tuple(variables)
    readers = (i for v in variables for i in body.touching.get(v, ()) if v in body.equations[i].operands)
    return not any(v in body.outputs for v in variables) and all(i in numbers for i in readers)


def _waist(body: Body, variable: int, above: Collection[int], inputs: Collection[int]) -> Waist:
    """Return the waist that separates a body into these equations, which read these inputs, and the others."""
    upper, lower = (tuple(e for i, e in enumerate(body.equations) if (i in above) == is_above) for is_above in (True, False))
    read, others = (tuple(v for v in body.inputs if (v in inputs) == is_above) for is_above in (True, False))
    parts = Body(read, (variable,), upper, body.tensors), Body((variable, *others), body.outputs, lower, body.tensors)
    return Waist(variable, frozenset(above), *parts)


def around_moves(body: Body, choices_of: Callable[[Body], Iterable[Any]]) -> Iterator[tuple[tuple[State, ...], tuple[State, ...]]]:
    """Yield the boundary states of a body for each pair of choices of a waist's two parts that need the waist in different slices.

    `choices_of` returns the choices of a part.
    """
    for waist in waists(body):
        for upper, lower in product(choices_of(waist.upper), choices_of(waist.lower)):
            if _is_move(upper.results[0], lower.operands[0]):
                states = waist.around(upper.operands, lower.operands)
                yield tuple(states[v] for v in body.inputs), lower.results


def _is_move(before: State, after: State) -> bool:
    return before.kind == "P" and after.kind in "PRU" and before != after


@lru_cache(maxsize=65536)
def moved(body: Body, operands: tuple[State, ...], results: tuple[State, ...]) -> Solution:
    """Return the solution along one axis with these boundary states in which a waist is moved.

    Raises Unmatched if no waist can be moved so.
    """
    solutions = (_moved_at(body, waist, operands, results) for waist in waists(body))
    solution = next((s for s in solutions if s is not None), None)
    if solution is None:
        raise Unmatched
    return solution


def _moved_at(body: Body, waist: Waist, operands: tuple[State, ...], results: tuple[State, ...]) -> Solution | None:
    """Return the solution with these boundary states in which a waist is moved, or None.

    Of several slices to which it could be moved, the first of those that divide most equations are taken.
    """
    states = dict(zip(body.inputs, operands, strict=True))
    above, below = ([states.get(v, UNUSED) for v in part.inputs] for part in (waist.upper, waist.lower))
    try:
        before = solve_either(waist.upper, _known(waist.upper, above, (UNUSED,))).results[0]
        upper = along_axis(waist.upper, tuple(above), (before,))
    except Unmatched:
        return None
    solutions: list[Solution] = []
    for after in _states_after(waist, below, results) if upper is not None and upper.matches else ():
        if _is_move(before, after) and (after.kind == "P" or not solutions):
            with suppress(Unmatched):
                lower = _solution(waist.lower, (after, *below[1:]), results)
                solutions += [lower] if lower.results == results else []
    lower = max(solutions, key=lambda s: sum(m.divided for m in s.matches), default=None)
    return None if lower is None or upper is None else _joined(body, waist, upper, lower)


def _states_after(waist: Waist, below: Sequence[State], results: tuple[State, ...]) -> Iterator[State]:
    """Yield the states to which a waist may be moved: that which follows from the boundary first."""
    known = _known(waist.lower, below, results)
    del known[waist.variable]
    with suppress(Unmatched):
        yield solve_either(waist.lower, known).states[waist.variable]
    yield from (partitioned(dim) for dim, n in enumerate(waist.lower.tensors[waist.variable].shape) if n > 1)
    yield from (REPLICATED, UNUSED)


def _joined(body: Body, waist: Waist, upper: Solution, lower: Solution) -> Solution:
    """Return the solution of a body from those of a waist's two parts, between which it is moved."""
    numbers = sorted(waist.above), [i for i in range(len(body.equations)) if i not in waist.above]
    parts = [(n, s) for n, s in zip(numbers, (upper, lower), strict=True)]
    matches = {i: match for n, s in parts for i, match in zip(n, s.matches, strict=True)}
    operands = waist.around(upper.operands, lower.operands)
    return Solution(
        {**lower.states, **upper.states},
        {**upper.reduced, **lower.reduced},
        tuple(match for _, match in sorted(matches.items())),
        tuple(operands[v] for v in body.inputs),
        lower.results,
        unused=upper.unused | (lower.unused - {waist.variable}),
        contributed=frozenset((n[i], p) for n, s in parts for i, p in s.contributed),
        scattered={**upper.scattered, **lower.scattered, waist.variable: lower.operands[0]},
    )


def _with_unused(body: Body, solution: Solution, operands: tuple[State, ...], results: tuple[State, ...]) -> Solution:
    """Return a solution with unused operands and results where the boundary states require them.

    Values that lead to these results alone are computed alike on every device, as are smaller values of unused operands, which are
    replicated where others read them. Raises Unmatched if nothing is computed alike from an unused operand.
    """
    unused_inputs = frozenset(v for v, s in zip(body.inputs, operands, strict=True) if s == UNUSED)
    targets = [a for a, s in zip(body.outputs, results, strict=True) if s == UNUSED and isinstance(a, int)]
    targets += [*contributions(body, solution), *rounded_apart(body, solution)]
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
    targets = [*body.outputs, *contributions(body, solution), *rounded_apart(body, solution)]
    targets = [a for a in targets if isinstance(a, int) and a in alike]
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


def _shrunk(body: Body, alike: set[int], inputs: Collection[int]) -> set[int]:
    """Return the variables that are computed alike from inputs and are at most as large as the operands they are computed from."""

    def nbytes(variables: Iterable[int]) -> int:
        return sum(body.tensors[v].nbytes for v in variables)

    shrunk = set[int]()
    for e in body.equations:
        operands = {a for a in e.operands if isinstance(a, int)}
        sources = operands.intersection(inputs) | operands.intersection(shrunk)
        if sources and alike.issuperset(e.results) and operands <= alike and nbytes(e.results) <= nbytes(sources):
            shrunk.update(e.results)
    return shrunk


def _computable_alike(body: Body, solution: Solution, inputs: Collection[int]) -> set[int]:
    """Return the variables that can be computed alike on every device, from reduced values and these inputs."""
    alike = {*solution.reduced, *inputs}
    for e, match in zip(body.equations, solution.matches, strict=True):
        if match.whole and all(isinstance(a, Literal) or a in alike for a in e.operands):
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
