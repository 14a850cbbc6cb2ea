"""Choices of loops: a carry leaves a step in the state in which it entered, and every device takes the steps that it needs.

All devices take the same number of steps if the predicate is the same on all: either its operands are, or the devices agree on its
value (`agreements`). If rows finish independently (`row_loops`), each device takes as many steps as its own rows need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from unity.pcg.ir.program import Body, Equation, close
from unity.pcg.propagation.nested.agreements import agreements, as_match, constant_results, repeated
from unity.pcg.propagation.nested.row_loops import Rows, rows_of
from unity.pcg.propagation.propagation import Solution
from unity.pcg.types.factors import Match
from unity.pcg.types.parallel_type import REPLICATED, State

NestedSolve = Callable[[Body, Mapping[int, State]], Solution | None]  # solves a nested program; None: it has no solution


@dataclass(frozen=True)
class Loop:
    """A loop of one program.

    Attributes:
        body: the program of one step: (constants, carry, slices of stacked operands) → (carry, slices of stacked results).
        constants, carried: how many inputs of the body are constants, and how many are carried.
        offset: how many operands of the equation precede the body's: those of its predicate.
        pinned: the inputs of the body that the predicate reads.
        rows: rows that finish independently, if the loop has such.
        test: the predicate.
        steps: the trip count; 1 if it is unknown.
    """

    body: Body
    constants: int
    carried: int
    offset: int = 0
    pinned: tuple[int, ...] = ()
    rows: Rows | None = None
    test: Body | None = None
    steps: int = 1


def loop_matches(
    loop_of: Callable[[Equation], Loop], solve_nested: NestedSolve
) -> Callable[[Equation, Mapping[int, State]], Iterator[Match]]:
    """Return the function that yields the matches of a `while` or a `scan`.

    Args:
        loop_of: reads the loop of an equation.
        solve_nested: solves its programs.
    """

    def matches(equation: Equation, known: Mapping[int, State]) -> Iterator[Match]:
        loop, n = loop_of(equation), len(equation.operands)
        result = list(_steady_matches(loop, solve_nested, n, known, loop.pinned))
        if loop.test is not None:
            carried = {p: s for p, s in known.items() if p >= loop.offset}
            tested = (_with_test(loop, solve_nested, m, known) for m in _steady_matches(loop, solve_nested, n, carried, ()))
            result += (m for m in tested if m is not None and all(m.states != other.states for other in result))
        yield from result

    return matches


def _with_test(loop: Loop, solve_nested: NestedSolve, match: Match, known: Mapping[int, State]) -> Match | None:
    """Return the match of a loop including its predicate, or None if devices could take a wrong number of steps.

    Each device takes the steps that its rows need, or all take the same number by a predicate on which they agree.
    """
    if loop.rows is not None and loop.rows.divide(match.results) and not match.communicates:
        return match if all(match.states[p] == s for p, s in known.items()) else None
    assert loop.test is not None
    first = loop.offset
    test_states = {loop.test.inputs[p]: s for p, s in known.items() if p < first}
    test_states |= zip(loop.test.inputs[first:], match.results, strict=True)
    solution = solve_nested(loop.test, test_states | {a: REPLICATED for a in loop.test.outputs if isinstance(a, int)})
    if solution is None or solution.operands[first:] != match.results:
        return None
    agreed = (replace(a, where=(1, *a.where)) for a in agreements(loop.test, solution))
    tested = replace(match, operands=solution.operands[:first] + match.operands[first:], agreed=(*match.agreed, *agreed))
    return tested if all(tested.states[p] == s for p, s in known.items()) else None


def _steady_matches(
    loop: Loop, solve_nested: NestedSolve, n: int, known: Mapping[int, State], pinned: Sequence[int]
) -> Iterator[Match]:
    """Yield the match, if there is one, of a loop of `n` operands whose carry has one state before and after a step.

    Args:
        loop: the loop.
        solve_nested: solves its program.
        n: the number of operands of its equation.
        known: known states by position of the equation.
        pinned: the inputs of its program that are replicated.
    """
    body, constants, carried, offset = loop.body, loop.constants, loop.carried, loop.offset
    inputs: dict[int, State] = dict.fromkeys(pinned, REPLICATED)
    for p, s in known.items():
        if p < n and p >= offset:
            if inputs.get(p - offset, s) != s:
                return
            inputs[p - offset] = _slice_state(s, p - offset >= constants + carried)
        elif p >= n:
            k = p - n
            if k < carried:
                inputs.setdefault(constants + k, s)
    if any(s is None for s in inputs.values()):
        return
    ends: dict[int, State] = {}  # of zeros, say, that a step returns: they can be made in the state of their carry
    for _ in range(4):
        solution = solve_nested(body, {body.inputs[k]: s for k, s in inputs.items()} | ends)
        if solution is None:
            return
        carry_in, carry_out = solution.operands[constants : constants + carried], solution.results[:carried]
        if carry_in == carry_out:
            break
        for k, (a, b) in enumerate(zip(carry_in, carry_out, strict=True)):
            v = body.outputs[k]
            if a != b and a == REPLICATED and constants + k not in pinned:
                inputs[constants + k] = b
            elif a != b and isinstance(v, int) and v not in ends and v in constant_results(body):
                ends[v] = a
            elif a != b:
                return
    else:
        return
    operands = [REPLICATED] * offset + [_stacked_state(s, k >= constants + carried) for k, s in enumerate(solution.operands)]
    results = [_stacked_state(s, k >= carried) for k, s in enumerate(solution.results)]
    if all(s == (operands + results)[p] for p, s in known.items()):
        yield repeated(as_match([(body, solution)], tuple(operands), tuple(results)), loop.steps)


def _slice_state(state: State, stacked: bool) -> Any:
    """Return the state of one step's slice of a stacked tensor; None if the dimension of steps is partitioned."""
    if not stacked or state.kind != "P":
        return state
    return State("P", state.dim - 1, state.outer) if state.dim > 0 else None


def _stacked_state(state: State, stacked: bool) -> State:
    """Return the state of a stacked tensor from that of one step's slice."""
    return State("P", state.dim + 1, state.outer) if stacked and state.kind == "P" else state


@lru_cache(maxsize=1024)
def while_loop_of(equation: Equation) -> Loop:
    """Return the loop of a `while` equation.

    The carried values that its predicate reads are pinned: if they are the same on every device, all take the same number of steps.
    """
    params = equation.params
    body, cond = close(params["body_jaxpr"]), close(params["cond_jaxpr"])
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    reads = {a for e in cond.equations for a in e.operands if isinstance(a, int)} & set(cond.inputs)
    carried = cond.inputs[n_cond:]
    pinned = tuple(n_body + k for k, v in enumerate(carried) if v in reads or v in cond.outputs)
    return Loop(body, n_body, len(body.outputs), n_cond, pinned, rows_of(equation), cond)
