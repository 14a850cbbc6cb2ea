"""Loops: what goes round must come out in the state in which it went in, and devices must take as many steps as the loop needs.

All take the same number where the predicate is the same on all: because what it looks at is, or because they agree on what it says
(`inside.py`). Where rows end apart (`rows.py`) each takes as many as its own rows need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from unity.pcg.ir.program import Body, Equation, close
from unity.pcg.propagation.agreements import agreements, as_match, repeated
from unity.pcg.propagation.propagation import Solution
from unity.pcg.propagation.row_loops import Rows, rows_of
from unity.pcg.types.factors import Match
from unity.pcg.types.parallel_type import REPLICATED, State

Quiet = Callable[[Body, Mapping[int, State]], Solution | None]  # solves a program inside, if it can be


@dataclass(frozen=True)
class Loop:
    """A loop's program, how many of its inputs are constants and go round, how many operands come before these (of its `test`),
    which of its inputs that looks at, rows that end apart (`rows.py`), and how many steps it takes (1 if nobody knows)."""

    body: Body
    constants: int
    carried: int
    offset: int = 0
    pinned: tuple[int, ...] = ()
    rows: Rows | None = None
    test: Body | None = None
    steps: int = 1


def loop_of(parts: Callable[[Equation], Loop], quiet: Quiet) -> Callable[[Equation, Mapping[int, State]], Iterator[Match]]:
    """while and scan: what goes round must come out in the state in which it went in."""

    def matches(equation: Equation, known: Mapping[int, State]) -> Iterator[Match]:
        loop, n = parts(equation), len(equation.operands)
        found = list(steady(loop, quiet, n, known, loop.pinned))
        if loop.test is not None:
            carried = {p: s for p, s in known.items() if p >= loop.offset}
            passed = (tested(loop, quiet, m, known) for m in steady(loop, quiet, n, carried, ()))
            found += (m for m in passed if m is not None and all(m.states != other.states for other in found))
        yield from found

    return matches


def tested(loop: Loop, quiet: Quiet, match: Match, known: Mapping[int, State]) -> Match | None:
    """A choice of a loop, if devices take as many steps as it needs: each as many as its own rows do, or all the same number, by a
    predicate that they agree on."""
    if loop.rows is not None and loop.rows.divide(match.results) and not match.communicates:
        return match if all(match.states[p] == s for p, s in known.items()) else None
    assert loop.test is not None
    first = loop.offset
    around = {loop.test.inputs[p]: s for p, s in known.items() if p < first}
    around |= zip(loop.test.inputs[first:], match.results, strict=True)
    solution = quiet(loop.test, around | {a: REPLICATED for a in loop.test.outputs if isinstance(a, int)})
    if solution is None or solution.operands[first:] != match.results:
        return None
    agreed = (replace(a, where=(1, *a.where)) for a in agreements(loop.test, solution))
    found = replace(match, operands=solution.operands[:first] + match.operands[first:], agreed=(*match.agreed, *agreed))
    return found if all(found.states[p] == s for p, s in known.items()) else None


def steady(loop: Loop, quiet: Quiet, n: int, known: Mapping[int, State], pinned: Sequence[int]) -> Iterator[Match]:
    """The choice of a loop of `n` operands, if there is one, in which these of its program's inputs are replicated."""
    body, constants, carried, offset = loop.body, loop.constants, loop.carried, loop.offset
    inputs: dict[int, State] = dict.fromkeys(pinned, REPLICATED)
    for p, s in known.items():
        if p < n and p >= offset:
            if inputs.get(p - offset, s) != s:
                return
            inputs[p - offset] = _step_in(s, p - offset >= constants + carried)
        elif p >= n:
            k = p - n
            if k < carried:
                inputs.setdefault(constants + k, s)
    if any(s is None for s in inputs.values()):
        return
    for _ in range(4):
        solution = quiet(body, {body.inputs[k]: s for k, s in inputs.items()})
        if solution is None:
            return
        carry_in, carry_out = solution.operands[constants : constants + carried], solution.results[:carried]
        if carry_in == carry_out:
            break
        for k, (a, b) in enumerate(zip(carry_in, carry_out, strict=True)):
            if a != b and a == REPLICATED and constants + k not in pinned:
                inputs[constants + k] = b
            elif a != b:
                return
    else:
        return
    operands = [REPLICATED] * offset + [_step_out(s, k >= constants + carried) for k, s in enumerate(solution.operands)]
    results = [_step_out(s, k >= carried) for k, s in enumerate(solution.results)]
    if all(s == (operands + results)[p] for p, s in known.items()):
        yield repeated(as_match([(body, solution)], tuple(operands), tuple(results)), loop.steps)


def _step_in(state: State, stacked: bool) -> Any:
    """The state of one step's slice of a stacked tensor; None if the steps themselves are partitioned."""
    if not stacked or state.kind != "P":
        return state
    return State("P", state.dim - 1, state.outer) if state.dim > 0 else None


def _step_out(state: State, stacked: bool) -> State:
    return State("P", state.dim + 1, state.outer) if stacked and state.kind == "P" else state


@lru_cache(maxsize=1024)
def while_parts(equation: Equation) -> Loop:
    """If what the predicate looks at is the same on every device, all of them take as many steps. Otherwise see `tested`."""
    params = equation.params
    body, cond = close(params["body_jaxpr"]), close(params["cond_jaxpr"])
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    looks_at = {a for e in cond.equations for a in e.operands if isinstance(a, int)} & set(cond.inputs)
    carried = cond.inputs[n_cond:]
    pinned = tuple(n_body + k for k, v in enumerate(carried) if v in looks_at or v in cond.outputs)
    return Loop(body, n_body, len(body.outputs), n_cond, pinned, rows_of(equation), cond)
