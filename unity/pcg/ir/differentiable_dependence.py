"""Differentiable dependence of each result of an equation on its operands, result by result through nested programs.

If all results of a loop, a checkpoint or a conditional depended on the same operands, a mask made of labels that one of these
returns beside the samples would seem to have a gradient. JAX differentiates them result by result, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from unity.pcg.ir.nested_programs import body_of
from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.jaxprs import BRANCHED, LOOPED, REMATERIALIZED, SCANNED, called
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.types.factors import facts_of

Places: TypeAlias = frozenset[int]  # operands or inputs, by number


def differentiated(e: Equation) -> list[int]:
    """Return the variables among an equation's operands in which the primitive has a derivative."""
    facts = facts_of(e.name)
    return [a for p, a in enumerate(e.operands) if isinstance(a, int) and facts.reads_for(p) is not None]


def differentiated_by_result(e: Equation) -> Sequence[Collection[int]]:
    """Return for each result of an equation the variables among its operands that it depends on differentiably.

    The results of calls with derivative rules all depend on each operand, since rules are not read.
    """
    if e.name not in _NESTED:
        return [differentiated(e)] * len(e.results)
    return [[a for p in sorted(places) if isinstance(a := e.operands[p], int)] for places in _operands_of_results(e)]


@lru_cache(maxsize=4096)
def _operands_of_results(e: Equation) -> tuple[Places, ...]:
    """Return for each result of an equation with nested programs the operands, by number, that it depends on differentiably."""
    return tuple(_NESTED[e.name](e))


def _of_checkpoint(e: Equation) -> Sequence[Places]:
    return _inputs_of_outputs(body_of(called(e.params)))


def _of_conditional(e: Equation) -> Sequence[Places]:
    """Return the dependence of a conditional's results, in any of its branches. Its first operand chooses the branch."""
    branches = [_inputs_of_outputs(body_of(b)) for b in e.params["branches"]]
    return [frozenset(p + 1 for places in of_branches for p in places) for of_branches in zip(*branches, strict=True)]


def _of_scan(e: Equation) -> Sequence[Places]:
    consts, carry = constants_and_carry(e.params)
    return _of_steps(_inputs_of_outputs(body_of(called(e.params))), range(consts, consts + carry))


def _of_while(e: Equation) -> Sequence[Places]:
    """Return the dependence of a `while` loop's results, which are its carries after any number of steps, none included."""
    tests, consts = e.params["cond_nconsts"], e.params["body_nconsts"]
    step = _inputs_of_outputs(body_of(e.params["body_jaxpr"]))
    carries = range(consts, consts + len(step))
    results = _of_steps(step, carries)
    return [frozenset(p + tests for p in places | {k}) for k, places in zip(carries, results, strict=True)]


def _of_steps(step: Sequence[Places], carries: Sequence[int]) -> Sequence[Places]:
    """Return the inputs of a loop that each output of its last step depends on, by those that it depends on in one step.

    The first outputs are the next values of the inputs `carries`.
    """
    results = list(step)
    while True:
        of_carries: Mapping[int, Places] = dict(zip(carries, results, strict=False))
        grown = [places.union(*(of_carries.get(p, frozenset()) for p in places)) for places in results]
        if grown == results:
            return results
        results = grown


def _inputs_of_outputs(body: Body) -> list[Places]:
    """Return for each output of a program the inputs, by number, that it depends on differentiably."""
    places: dict[int, Places] = {v: frozenset((p,)) for p, v in enumerate(body.inputs) if body.tensors[v].floating}
    for e in body.equations:
        for v, read in zip(e.results, differentiated_by_result(e), strict=True):
            if body.tensors[v].floating:
                places[v] = frozenset[int]().union(*(places.get(a, frozenset()) for a in read))
    return [places.get(a, frozenset()) if isinstance(a, int) else frozenset() for a in body.outputs]


_NESTED: dict[str, Callable[[Equation], Sequence[Places]]] = {
    **dict.fromkeys(REMATERIALIZED, _of_checkpoint),
    **dict.fromkeys(BRANCHED, _of_conditional),
    **dict.fromkeys(LOOPED, _of_while),
    **dict.fromkeys(SCANNED, _of_scan),
}
