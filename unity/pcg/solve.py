"""Which states a body's variables can have along one axis: factors followed through a composite's own program.

A composite's legal parallelizations are not written down anywhere: they are found by putting an axis on a factor of one of its
equations and following it through the others (`propagation`). An equation's own choices are the operator table's, or, where it has
a program inside (a call, a branch, a loop), those of that program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd
from typing import Any

from jax.extend import core

from unity.pcg import linear
from unity.pcg.body import Body, Equation, from_jaxpr
from unity.pcg.custom import Unreadable, close, jvp_body, readable, vjp_bodies
from unity.pcg.factors import TABLE, Match, Spec, matching
from unity.pcg.propagation import Conflict, Propagation, Solution, Unmatched
from unity.pcg.rows import Rows, rows_of
from unity.pcg.scans import constants_and_carry
from unity.pcg.state import PARTIAL, REPLICATED, State

SPECS: dict[int, tuple[Equation, Spec | None]] = {}  # by identity: a specification is asked for thousands of times


def spec_of(body: Body, equation: Equation) -> Spec | None:
    """What the operator table says of one equation (None: nothing, so all its factors are blocked)."""
    found = SPECS.get(id(equation))
    if found is None or found[0] is not equation:
        entry = TABLE.get(equation.name)
        operands = [body.tensor(a) for a in equation.operands]
        results = [body.tensor(v) for v in equation.results]
        found = SPECS[id(equation)] = (equation, entry.spec(equation.params, operands, results) if entry else None)
    return found[1]


def solve(body: Body, known: Mapping[int, State]) -> Solution:
    """Extends the known states (by variable) to all of the body, reducing partial values where it must.

    Raises Unmatched if the body cannot be parallelized so.
    """
    reduced: dict[int, str] = {}
    while True:
        try:
            return Propagation(body, known, reduced, equation_matches).run()
        except Conflict as conflict:
            variable = conflict.variable
            if variable is None or variable in reduced or variable in body.inputs:
                raise Unmatched from None
            reduced[variable] = "sum"


def equation_matches(body: Body, equation: Equation, known: Mapping[int, State]) -> Sequence[Match]:
    """The legal choices of one equation that agree with the known states of its positions."""
    n, m = len(equation.operands), len(equation.results)
    nested = NESTED.get(equation.name)
    if nested is not None:
        if all(s == REPLICATED for s in known.values()) and len(known) == n + m:
            whole = [Match("replicated", (REPLICATED,) * n, (REPLICATED,) * m, 0, 0.0)]
            return whole if replicable_call(equation) else []
        return _nested(_Asked(TABLE.version, equation.signature, equation.identity, tuple(known.items()), equation))
    spec = spec_of(body, equation) or Spec(())
    return matching(spec, known, n, m)


@dataclass(frozen=True)
class _Asked:
    """An equation with a program inside, and what is known around it; equal ones have the same choices."""

    table: int  # its version
    signature: str
    identity: tuple[int, ...]
    known: tuple[tuple[int, State], ...]
    equation: Equation = field(compare=False)


@lru_cache(maxsize=16384)
def _nested(asked: _Asked) -> tuple[Match, ...]:
    """The choices of an equation with a program inside: asked for once for all layers, and for all programs that have it."""
    return tuple(NESTED[asked.equation.name](asked.equation, dict(asked.known)))


@lru_cache(maxsize=8192)
def replicable(body: Body) -> bool:
    """Whether a body can be replicated for use: its cotangents are partial sums then, which a custom_vjp may not pass on, nor a
    primitive that nobody described, for JAX may not know of its results that they differ between devices."""
    return all(replicable_call(e) if e.name in NESTED else e.name in TABLE for e in body.equations)


def replicable_call(equation: Equation) -> bool:
    """Whether a nested call can be replicated for use."""
    if equation.name.startswith("custom_vjp_call"):
        return derivative_agrees(equation, (REPLICATED,) * len(equation.operands), (REPLICATED,) * len(equation.results))
    if equation.name == "cond":
        return all(map(replicable, branches(equation)))
    if equation.name == linear.LINEAR_SOLVE:
        return all(replicable(linear.part_of(equation, name)) for name in linear.named(equation))
    if equation.name == "custom_jvp_call":
        return readable(equation)
    return equation.name == "while" or replicable(nested_body(equation))


def _as_match(solved: Iterable[tuple[Body, Solution]], operands: tuple[State, ...], results: tuple[State, ...]) -> Match:
    """A choice of an equation, given how each of its programs runs then."""
    size, divided = 0, False
    for body, solution in solved:
        for match in solution.matches:
            size, divided = gcd(size, match.size), divided or bool(match.divided)
        for v in handed_on(body):  # no equation of the program says how far these can be divided
            state = solution.states[v]
            if state.kind == "P":
                size = gcd(size, body.tensors[v].shape[state.dim] // state.outer)
                divided = divided or not body.equations  # then to hand on is all the work there is
    return Match("nested", operands, results, size, float(divided))


def handed_on(body: Body) -> tuple[int, ...]:
    """The inputs of a body that are its results as they are."""
    return tuple(a for a in body.inputs if a in body.outputs)


def _call(equation: Equation, known: Mapping[int, State]) -> Iterator[Match]:
    """custom_jvp_call, custom_vjp_call, remat: what their body allows, and their own derivative rules too."""
    body = nested_body(equation)
    n = len(equation.operands)
    names = {p: (body.inputs[p] if p < n else body.outputs[p - n]) for p in known}
    solution = _quiet_solve(body, {v: known[p] for p, v in names.items() if isinstance(v, int)})
    if solution is not None and derivative_agrees(equation, solution.operands, solution.results):
        yield _as_match([(body, solution)], solution.operands, solution.results)


def derivative_agrees(equation: Equation, operands: tuple[State, ...], results: tuple[State, ...]) -> bool:
    """Whether a custom derivative rule, run on pieces, gives the pieces of the derivative.

    A tangent is in its primal's state; a cotangent is in the dual one (partial for replicated, replicated for partial).
    """
    try:
        if equation.name == "custom_jvp_call":
            if not readable(equation):
                return False
            rule = jvp_body(equation)
            tangents = tuple(s for s, float_ in zip(operands, rule.floating, strict=True) if float_)
            known = dict(zip(rule.body.inputs, operands + tangents, strict=True))
            found = _quiet_solve(rule.body, known | _results(rule.body, results + results))
            return found is not None and found.results == results + results
        if equation.name.startswith("custom_vjp_call"):
            return vjp_solutions(equation, operands, results) is not None
    except Unreadable:
        return False
    return True


def _results(body: Body, states: Sequence[State]) -> dict[int, State]:
    """The results of a body and the states that they are to have: a constant among them is made in any."""
    return {a: s for a, s in zip(body.outputs, states, strict=True) if isinstance(a, int) and a not in body.inputs}


def vjp_solutions(equation: Equation, operands: tuple[State, ...], results: tuple[State, ...]) -> tuple[Solution, Solution] | None:
    """How a custom_vjp's forward and backward rule run along one axis."""
    rule = vjp_bodies(equation)
    forward = _quiet_solve(rule.forward, dict(zip(rule.forward.inputs, operands, strict=True)))
    if forward is None or forward.results[: len(results)] != results:
        return None
    cotangents = tuple(dual(s) for s in results)
    known = dict(zip(rule.backward.inputs, (*forward.results[len(results) :], *cotangents), strict=True))
    wanted = [dual(s) for s, float_ in zip(operands, rule.floating, strict=True) if float_]
    known |= {a: s for a, s in zip(rule.backward.outputs, wanted, strict=True) if isinstance(a, int)}
    backward = _quiet_solve(rule.backward, known)
    if backward is None or any(
        s != w for s, w, a in zip(backward.results, wanted, rule.backward.outputs, strict=True) if isinstance(a, int)
    ):
        return None
    return forward, backward


def dual(state: State) -> State:
    """The state of a cotangent."""
    return {"R": PARTIAL, "S": REPLICATED}.get(state.kind, state)


def _quiet_solve(body: Body, known: Mapping[int, State]) -> Solution | None:
    """A solution without Reduces and halos inside: control flow may not communicate."""
    try:
        solution = solve(body, known)
    except Unmatched:
        return None
    return None if solution.reduced or any(m.halo for m in solution.matches) else solution


def _cond(equation: Equation, known: Mapping[int, State]) -> Iterator[Match]:
    """All branches must agree; the index is the same on every device."""
    n = len(equation.operands)
    if known.get(0, REPLICATED) != REPLICATED:
        return
    operands: dict[int, State] = {p: s for p, s in known.items() if 0 < p < n}
    results: dict[int, State] = {p - n: s for p, s in known.items() if p >= n}
    solved: dict[int, tuple[Body, Solution]] = {}
    for _ in range(2):  # the second round sees what the last branch of the first has fixed
        for b, branch in enumerate(branches(equation)):
            states = {branch.inputs[p - 1]: s for p, s in operands.items()}
            states |= {v: results[k] for k, v in enumerate(branch.outputs) if k in results and isinstance(v, int)}
            solution = _quiet_solve(branch, states)
            if solution is None:
                return
            solved[b] = branch, solution
            operands = dict(enumerate(solution.operands, 1))
            results = {k: s for k, s in enumerate(solution.results) if isinstance(branch.outputs[k], int)}
    if all(k in results for k in range(len(equation.results))):
        ends = (REPLICATED, *(operands[p] for p in range(1, n))), tuple(results[k] for k in range(len(results)))
        yield _as_match(solved.values(), *ends)


def _linear_solve(equation: Equation, known: Mapping[int, State]) -> Iterator[Match]:
    """All programs must agree, and a solution lie as the right side does: derivatives take one for the other."""
    n, count = len(equation.operands), len(equation.results)
    states, (closed, right) = dict(known), linear.parts(equation, range(n))
    positions = {name: [*closed[name], *right] for name in linear.named(equation)}
    solved = None
    for name in (*positions, *positions):  # the second round sees what the first has found
        ends = range(n, n + (count if name == "solve" else len(right)))
        places = (*positions[name], *ends)
        if known and states.keys().isdisjoint(places):
            continue
        body = linear.part_of(equation, name)
        around = zip((*body.inputs, *body.outputs), places, strict=False)  # transpose_solve may report, too
        found = _quiet_solve(body, {v: states[p] for v, p in around if isinstance(v, int) and p in states})
        if found is None:
            return
        states |= zip(places, (*found.operands, *found.results), strict=False)
        solved = (body, found) if name == "solve" else solved
    if solved is None or any(states[p] != states[n + k] for k, p in enumerate(right)):
        return
    operands, results = (tuple(states[p] for p in part) for part in (range(n), range(n, n + count)))
    if all(s == (operands + results)[p] for p, s in known.items()):
        yield _as_match([solved], operands, results)


@dataclass(frozen=True)
class _Loop:
    """A loop's program, how many of its inputs are constants and go round, how many operands come before these, which of its inputs
    are the same on every device, and rows that end apart (`rows.py`)."""

    body: Body
    constants: int
    carried: int
    offset: int = 0
    pinned: tuple[int, ...] = ()
    rows: Rows | None = None


def _loop(parts: Callable[[Equation], _Loop]) -> Callable[[Equation, Mapping[int, State]], Iterator[Match]]:
    """while and scan: what goes round must come out in the state in which it went in."""

    def matches(equation: Equation, known: Mapping[int, State]) -> Iterator[Match]:
        loop, n = parts(equation), len(equation.operands)
        yield from _steady(loop, n, known, loop.pinned)
        if loop.rows is not None:
            yield from (m for m in _steady(loop, n, known, ()) if loop.rows.divide(m.results))

    return matches


def _steady(loop: _Loop, n: int, known: Mapping[int, State], pinned: Sequence[int]) -> Iterator[Match]:
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
        solution = _quiet_solve(body, {body.inputs[k]: s for k, s in inputs.items()})
        if solution is None:
            return
        carry_in, carry_out = solution.operands[constants : constants + carried], solution.results[:carried]
        if carry_in == carry_out:
            break
        for k, (a, b) in enumerate(zip(carry_in, carry_out, strict=True)):
            if a != b and a == REPLICATED:
                inputs[constants + k] = b
            elif a != b:
                return
    else:
        return
    operands = [REPLICATED] * offset + [_step_out(s, k >= constants + carried) for k, s in enumerate(solution.operands)]
    results = [_step_out(s, k >= carried) for k, s in enumerate(solution.results)]
    if all(s == (operands + results)[p] for p, s in known.items()):
        yield _as_match([(body, solution)], tuple(operands), tuple(results))


def _step_in(state: State, stacked: bool) -> Any:
    """The state of one step's slice of a stacked tensor; None if the steps themselves are partitioned."""
    if not stacked or state.kind != "P":
        return state
    return State("P", state.dim - 1, state.outer) if state.dim > 0 else None


def _step_out(state: State, stacked: bool) -> State:
    return State("P", state.dim + 1, state.outer) if stacked and state.kind == "P" else state


PROGRAMS = ("call_jaxpr", "jaxpr", "fun_jaxpr")  # parameters that hold the program of a call-like equation, the first that is there


def nests(equation: Equation) -> bool:
    """Whether an equation is call-like: it has one program, which `nested_body` gives."""
    return any(name in equation.params for name in PROGRAMS)


@lru_cache(maxsize=4096)
def nested_body(equation: Equation) -> Body:
    """The program of a call-like equation."""
    return _program(next(equation.params[name] for name in PROGRAMS if name in equation.params))


@lru_cache(maxsize=4096)
def branches(equation: Equation) -> tuple[Body, ...]:
    """The programs of a cond."""
    return tuple(_program(b) for b in equation.params["branches"])


def _program(inner: Any) -> Body:
    if isinstance(inner, Body):  # rewritten
        return inner
    return close(inner) if isinstance(inner, core.ClosedJaxpr) else from_jaxpr(inner)


@lru_cache(maxsize=1024)
def _while_parts(equation: Equation) -> _Loop:
    """What the predicate looks at is the same on every device, so that all of them take as many steps, unless rows end apart."""
    params = equation.params
    body, cond = close(params["body_jaxpr"]), close(params["cond_jaxpr"])
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    looks_at = {a for e in cond.equations for a in e.operands if isinstance(a, int)} & set(cond.inputs)
    carried = cond.inputs[n_cond:]
    pinned = tuple(n_body + k for k, v in enumerate(carried) if v in looks_at or v in cond.outputs)
    return _Loop(body, n_body, len(body.outputs), n_cond, pinned, rows_of(equation))


@lru_cache(maxsize=1024)
def _scan_parts(equation: Equation) -> _Loop:
    return _Loop(nested_body(equation), *constants_and_carry(equation.params))


NESTED: dict[str, Callable[[Equation, Mapping[int, State]], Any]] = {
    "custom_jvp_call": _call,
    "custom_vjp_call": _call,
    "custom_vjp_call_jaxpr": _call,
    "remat2": _call,
    "checkpoint": _call,
    "cond": _cond,
    "while": _loop(_while_parts),
    "scan": _loop(_scan_parts),
    linear.LINEAR_SOLVE: _linear_solve,
}
