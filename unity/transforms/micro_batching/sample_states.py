"""States of a program's values along an axis that partitions its samples, and the equations that must run before or after the loop.

By the operator table, such an axis must leave every value partitioned in the samples, a partial sum over them, or independent of
them. Two kinds of equations have no such states. One that reads a partial sum comes after the loop over micro-batches, with all
that depends on it. One that computes an array with an entry for each sample from no argument with samples, such as
`jnp.linspace(0, 1, n)`, comes before the loop, unless each device can compute its slice. Its result is partitioned as arguments
are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property

from unity.pcg.capture.capture import Captured
from unity.pcg.ir.dead_code import dependent_equations, descendants, used
from unity.pcg.ir.program import Body
from unity.pcg.parallel.stages import Mixed
from unity.pcg.propagation.propagation import Solution, Unmatched
from unity.pcg.propagation.solved_prefix import first_unmatched
from unity.pcg.propagation.solver import solve
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State
from unity.transforms.micro_batching.sample_dimensions import DIMENSIONS, SampleDimensions
from unity.transforms.splice import operator_at, variables_of


@dataclass(frozen=True, eq=False)
class SampleStates:
    """States of a program's values along an axis of micro-batches.

    Attributes:
        body: the program.
        solution: the states of the values that `solved_equations` read and compute.
        before: the numbers of the equations that compute arrays with an entry for each sample before the loop.
        after: the numbers of the equations that need complete sums over the samples.
    """

    body: Body
    solution: Solution
    before: frozenset[int]
    after: frozenset[int]

    @cached_property
    def solved_equations(self) -> list[int]:
        """The numbers of the equations that are neither `before` nor `after`."""
        return [i for i in range(len(self.body.equations)) if i not in self.before and i not in self.after]

    def is_partitioned(self, variable: int) -> bool:
        """Return whether a value is partitioned in the samples."""
        return self.solution.seen(variable).kind == "P"

    def has_samples(self, number: int) -> bool:
        """Return whether an equation reads or computes samples, or sums over them."""
        e = self.body.equations[number]
        if any(v not in self.solution.states for v in e.results):
            return False  # nothing reads them
        states = [*map(self.solution.seen, variables_of(e.operands)), *(self.solution.states[v] for v in e.results)]
        return any(s.kind == "P" or s == PARTIAL for s in states)

    def dependents_of(self, sums: Iterable[int]) -> Iterator[tuple[int, bool]]:
        """Yield the equations that depend on some sums, by number, and whether each also reads samples."""
        complete = set(sums)
        for i in self.solved_equations:
            e = self.body.equations[i]
            operands = set(variables_of(e.operands))
            if not complete.isdisjoint(operands):
                yield i, any(map(self.is_partitioned, operands - complete))
                complete.update(e.results)


def sample_states(captured: Captured, samples: SampleDimensions, count: int) -> SampleStates:
    """Return the states of a program's values along an axis of `count` micro-batches.

    Raises Mixed, naming the first operator that does not work sample by sample.
    """
    body, states, independent = captured.body, samples.states(count), _independent(captured, samples.size)
    before, after = set[int](), set[int]()
    while True:
        part = _without(body, before, after)
        try:
            solution = solve(part, states, patient=False)
        except Unmatched:
            number, reads_sum = _first_unmatched(body, before, after, states)
            if reads_sum:
                after |= {number, *dependent_equations(body, body.equations[number].results)}
            elif (more := _producers(body, independent.intersection(body.equations[number].operands))) <= before:
                raise Mixed(f"{operator_at(body.equations[number])} does not work on each sample by itself") from None
            else:
                before |= more
            continue
        partial = [v for v in part.inputs if solution.states.get(v) == PARTIAL]
        if not partial:
            return SampleStates(body, solution, frozenset(before), frozenset(after))
        states |= dict.fromkeys(partial, REPLICATED)


def _independent(captured: Captured, size: int) -> frozenset[int]:
    """Return the computed variables of the samples' size that depend on no weight, and on no input of that size."""
    body = captured.body

    def sized(v: int) -> bool:
        return size in body.tensors[v].shape[:DIMENSIONS]

    dependent = descendants(body, (v for k, v in enumerate(body.inputs) if k in captured.differentiated or sized(v)))
    return frozenset(v for e in body.equations for v in e.results if v not in dependent and sized(v))


def _producers(body: Body, variables: AbstractSet[int]) -> set[int]:
    """Return the numbers of the equations that compute some variables."""
    return {i for i, e in enumerate(body.equations) if not variables.isdisjoint(e.results)}


def _without(body: Body, before: Collection[int], after: Collection[int]) -> Body:
    """Return the program without some equations.

    The results of `before` are its further inputs, and the operands of `after` and the other outputs its outputs.
    """
    equations = tuple(e for i, e in enumerate(body.equations) if i not in after and i not in before)
    inputs = (*body.inputs, *(v for i in sorted(before) for v in body.equations[i].results))
    computed = {*inputs, *(v for e in equations for v in e.results)}
    ends = [*variables_of(body.outputs), *(a for i in sorted(after) for a in variables_of(body.equations[i].operands))]
    outputs = tuple(dict.fromkeys(v for v in ends if v in computed))
    return used(replace(body, inputs=inputs, equations=equations, outputs=outputs))


def _first_unmatched(body: Body, before: Collection[int], after: Collection[int], known: Mapping[int, State]) -> tuple[int, bool]:
    """Return the first equation up to which the program has no solution, and whether it reads a partial sum."""
    numbers = [i for i in range(len(body.equations)) if i not in after and i not in before]
    part = replace(body, inputs=_without(body, before, after).inputs, equations=tuple(body.equations[i] for i in numbers))
    place, solution = first_unmatched(part, known, patient=False)
    operands = variables_of(part.equations[place].operands)
    return numbers[place], any(solution.seen(a) == PARTIAL for a in operands if a in solution.states)
