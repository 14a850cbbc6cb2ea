"""Which states a body's variables can have along one axis: factors followed through a composite's own program.

A composite's legal parallelizations are not written down anywhere: they are found by putting an axis on a factor of one of its
equations and following it through the others (`propagation`). An equation's own choices are the operator table's, or, where it has
a program inside (a call, a branch, a loop), those of that program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from jax.dtypes import float0
from jax.extend import core

from unity.pcg.ir.program import Body, Equation, from_jaxpr
from unity.pcg.jaxprs.foreign_primitives import first_order
from unity.pcg.jaxprs.jaxprs import LINEAR_SOLVE, RULED, called
from unity.pcg.jaxprs.scan_operands import constants_and_carry
from unity.pcg.propagation import linear_solves as linear
from unity.pcg.propagation.agreements import agreeable, agreements, as_match, constant_results
from unity.pcg.propagation.derivative_rules import Unreadable, close, jvp_body, readable, vjp_bodies
from unity.pcg.propagation.loops import Loop, loop_of, while_parts
from unity.pcg.propagation.propagation import Conflict, Place, Propagation, Solution, Unmatched
from unity.pcg.types.factors import TABLE, Differentiated, Match, Spec, matching
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State

ON_HOST = "pure_callback"  # JAX refuses to differentiate it
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


def solve(body: Body, known: Mapping[int, State], contributing: bool = False) -> Solution:
    """Extends the known states (by variable) to all of the body, reducing partial values where it must.

    `contributing`: where it can, what is whole is rather contributed to partial sums. Raises Unmatched if the body cannot be
    parallelized so.
    """
    reduced: dict[int, str] = {}
    contributed: set[Place] = set()
    while True:
        try:
            around = {v: s for v, s in known.items() if v not in reduced or s != REPLICATED}  # users have what is reduced whole
            return Propagation(body, around, reduced, equation_matches, contributed if contributing else None).run()
        except Conflict as conflict:
            if contributing and not conflict.places <= contributed:
                contributed |= conflict.places
                continue
            variable = conflict.variable
            if variable is None or variable in reduced or variable in body.inputs:
                raise Unmatched(not contributing and (bool(conflict.places) or conflict.summed)) from None
            reduced[variable] = "sum"


def solve_either(body: Body, known: Mapping[int, State]) -> Solution:
    """Solves a body, contributing values to partial sums only where there is no other solution."""
    try:
        return solve(body, known)
    except Unmatched as problem:
        if not problem.contributing:
            raise
    return solve(body, known, contributing=True)


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
    primitive that nobody described, for JAX may not know of its results that they differ between devices. What the host computes
    passes none on."""
    return all(replicable_call(e) if e.name in NESTED else e.name in TABLE or e.name == ON_HOST for e in body.equations)


def replicable_call(equation: Equation) -> bool:
    """Whether a nested call can be replicated for use."""
    if reversed_only(equation):
        return derivative(equation, (REPLICATED,) * len(equation.operands), (REPLICATED,) * len(equation.results)) is not None
    if equation.name == "cond":
        return all(map(replicable, branches(equation)))
    if equation.name == LINEAR_SOLVE:
        return all(replicable(linear.part_of(equation, name)) for name in linear.named(equation))
    return equation.name in ("while", "custom_jvp_call") or replicable(nested_body(equation))


def _call(equation: Equation, known: Mapping[int, State]) -> Iterator[Match]:
    """custom_jvp_call, custom_vjp_call, remat: what their body allows, and their own derivative rules too."""
    body = nested_body(equation)
    n = len(equation.operands)
    names = {p: (body.inputs[p] if p < n else body.outputs[p - n]) for p in known}
    solution = _quiet_solve(body, {v: known[p] for p, v in names.items() if isinstance(v, int)})
    if solution is None:
        return
    operands = _with_unread(equation, body, solution, known)
    solution = _with_constants(equation, body, solution, operands, names)
    rule = derivative(equation, operands, solution.results)
    if rule is not None:
        match = as_match([(body, solution)], operands, solution.results)
        yield match if equation.name not in RULED else replace(match, ruled=None if equation.motionless else rule)


def _with_constants(
    equation: Equation, body: Body, solution: Solution, operands: tuple[State, ...], names: Mapping[int, Any]
) -> Solution:
    """A call's results that depend on no operand can be in any state: here in that which a `custom_jvp`'s rule has them in, beside
    tangents that are divided."""
    free = constant_results(body) - {v for v in names.values() if isinstance(v, int)}
    if not free or equation.motionless or equation.name != "custom_jvp_call" or reversed_only(equation):
        return solution
    rule = jvp_body(equation)
    around = operands + tuple(s for s, float_ in zip(operands, rule.floating, strict=True) if float_)
    ends = zip(rule.body.outputs, body.outputs, solution.results, strict=False)
    fixed = {a: s for a, v, s in ends if v not in free and isinstance(a, int) and a not in rule.body.inputs}
    found = _quiet_solve(rule.body, dict(zip(rule.body.inputs, around, strict=True)) | fixed)
    if found is None:
        return solution
    ends = zip(body.outputs, found.results, strict=False)
    made = {v: s for v, s in ends if isinstance(v, int) and v in free and s.kind == "P"}
    inner = dict(zip(body.inputs, operands, strict=True)) | made
    return (_quiet_solve(body, inner) if made else None) or solution


def _with_unread(equation: Equation, body: Body, solution: Solution, known: Mapping[int, State]) -> tuple[State, ...]:
    """The states of a call's operands, of which its program may leave some to its rule: the matrix beside its factors, say."""
    unread = [k for k, v in enumerate(body.inputs) if k not in known and v not in body.touching and v not in body.outputs]
    if not unread or not reversed_only(equation):
        return solution.operands
    try:
        rule = vjp_bodies(equation)
    except Unreadable:
        return solution.operands
    first, back, n = rule.forward, rule.backward, len(solution.results)
    forward = _quiet_solve(first, {v: solution.operands[k] for k, v in enumerate(first.inputs) if k not in unread})
    if forward is None or not _same(first, forward, solution.results):
        return solution.operands
    operands = list(forward.operands)
    around = (*forward.results[n:], *map(dual, solution.results))
    backward = _quiet_solve(back, dict(zip(back.inputs, around, strict=True)))
    made = iter(backward.results if backward is not None else ())
    kept = {a for a, v in zip(first.outputs[n:], back.inputs, strict=False) if v in back.touching}
    for k, cotangent in zip((k for k, f in enumerate(rule.floating) if f), made, strict=False):
        v = first.inputs[k]
        if k in unread and cotangent.kind == "P" and v not in first.touching and v not in kept:
            operands[k] = cotangent  # no rule reads it, so it lies as its gradient does
    return tuple(operands)


def reversed_only(equation: Equation) -> bool:
    """Whether a call is differentiated in reverse alone: by its rule, or because the rule of a `custom_jvp` returns constants as
    derivatives of whole numbers, of which JAX has none that differ between devices."""
    if equation.motionless or equation.name not in RULED:
        return False
    if equation.name != "custom_jvp_call" or not readable(equation):
        return True
    return any(not isinstance(a, int) and a.tensor.dtype == float0 for a in jvp_body(equation).body.outputs)


def derivative(equation: Equation, operands: tuple[State, ...], results: tuple[State, ...]) -> Differentiated | None:
    """What devices agree on in a custom derivative rule; None if that, run on pieces, does not give the pieces of the derivative.

    A tangent is in its primal's state; a cotangent is in the dual one (partial for replicated, replicated for partial).
    """
    if equation.motionless:
        return Differentiated()
    try:
        if reversed_only(equation):
            both, rule = vjp_solutions(equation, operands, results), vjp_bodies(equation)
            return both and Differentiated(
                *(tuple(agreements(*part)) for part in zip((rule.forward, rule.backward), both, strict=True))
            )
        if equation.name == "custom_jvp_call":
            rule = jvp_body(equation)
            tangents = tuple(s for s, float_ in zip(operands, rule.floating, strict=True) if float_)
            known = dict(zip(rule.body.inputs, operands + tangents, strict=True))
            found = _quiet_solve(rule.body, known | _results(rule.body, results + results))
            if found is None or not _same(rule.body, found, results + results):
                return None
            return Differentiated(tuple(agreements(rule.body, found)))
    except Unreadable:
        return None
    return Differentiated()


def _same(body: Body, solution: Solution, wanted: Sequence[State]) -> bool:
    """Whether a program's first results come out so; constants, such as the derivatives of whole numbers, are whole."""
    ends = zip(body.outputs, solution.results, wanted, strict=False)
    return all(s == w if isinstance(a, int) else w == REPLICATED for a, s, w in ends)


def _results(body: Body, states: Sequence[State]) -> dict[int, State]:
    """The results of a body and the states that they are to have: a constant among them is made in any."""
    return {a: s for a, s in zip(body.outputs, states, strict=True) if isinstance(a, int) and a not in body.inputs}


def vjp_solutions(equation: Equation, operands: tuple[State, ...], results: tuple[State, ...]) -> tuple[Solution, Solution] | None:
    """How a custom_vjp's forward and backward rule run along one axis."""
    rule = vjp_bodies(equation)
    forward = _quiet_solve(rule.forward, dict(zip(rule.forward.inputs, operands, strict=True)))
    if forward is None or not _same(rule.forward, forward, results):
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
    """A solution without halos, and without Reduces but of single numbers that have no gradient, such as what a predicate says: all
    devices are at the same place of the program, so they can agree on these. Who uses a reduced value outside takes it as whole."""
    try:
        solution = solve(body, known)
    except Unmatched:
        return None
    if any(m.halo for m in solution.matches) or not all(agreeable(body, v) for v in solution.reduced):
        return None
    if not solution.reduced:
        return solution
    results = (REPLICATED if a in solution.reduced else s for a, s in zip(body.outputs, solution.results, strict=True))
    return replace(solution, results=tuple(results))


def _cond(equation: Equation, known: Mapping[int, State]) -> Iterator[Match]:
    """All branches must agree; the index is the same on every device."""
    n = len(equation.operands)
    if known.get(0, REPLICATED) != REPLICATED:
        return
    operands: dict[int, State] = {p: s for p, s in known.items() if 0 < p < n}
    results: dict[int, State] = {p - n: s for p, s in known.items() if p >= n}
    solved: dict[int, tuple[Body, Solution]] = {}
    for last in (False, True):  # the second round sees what the last branch of the first has fixed
        for b, branch in enumerate(branches(equation)):
            states = {branch.inputs[p - 1]: s for p, s in operands.items()}
            states |= {v: results[k] for k, v in enumerate(branch.outputs) if k in results and isinstance(v, int)}
            solution = _quiet_solve(branch, states)
            if solution is None:
                return
            solved[b] = branch, solution
            # what a branch hands on, or leaves, or makes of constants, may be in any state, which other branches may fix
            free = {v for v in branch.inputs if v not in branch.touching and v not in states} | constant_results(branch)
            free = set() if last else free
            operands |= {p: s for p, (v, s) in enumerate(zip(branch.inputs, solution.operands, strict=True), 1) if v not in free}
            ends = enumerate(zip(branch.outputs, solution.results, strict=True))
            results |= {k: s for k, (a, s) in ends if isinstance(a, int) and a not in free}
    every = tuple(results.get(k, REPLICATED) for k in range(len(equation.results)))
    constant = {k for b in branches(equation) for k, a in enumerate(b.outputs) if not isinstance(a, int)}
    if all(every[k].kind == "R" for k in constant):  # a constant is whole
        yield as_match(solved.values(), (REPLICATED, *(operands[p] for p in range(1, n))), every)


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
        yield as_match([solved], operands, results)


def nests(equation: Equation) -> bool:
    """Whether an equation is call-like: it has one program, which `nested_body` gives."""
    return called(equation.params) is not None


@lru_cache(maxsize=4096)
def nested_body(equation: Equation) -> Body:
    """The program of a call-like equation. One with a rule of its own is differentiated by that, so rules inside are not kept: they
    could not even be read where they use what is around them."""
    program = called(equation.params)
    return _program(first_order(program) if equation.name in RULED and isinstance(program, core.ClosedJaxpr) else program)


@lru_cache(maxsize=4096)
def branches(equation: Equation) -> tuple[Body, ...]:
    """The programs of a cond."""
    return tuple(_program(b) for b in equation.params["branches"])


def _program(inner: Any) -> Body:
    if isinstance(inner, Body):  # rewritten
        return inner
    return close(inner) if isinstance(inner, core.ClosedJaxpr) else from_jaxpr(inner)


@lru_cache(maxsize=1024)
def _scan_parts(equation: Equation) -> Loop:
    return Loop(nested_body(equation), *constants_and_carry(equation.params), steps=equation.params["length"])


NESTED: dict[str, Callable[[Equation, Mapping[int, State]], Any]] = {
    "custom_jvp_call": _call,
    "custom_vjp_call": _call,
    "custom_vjp_call_jaxpr": _call,
    "remat2": _call,
    "checkpoint": _call,
    "cond": _cond,
    "while": loop_of(while_parts, _quiet_solve),
    "scan": loop_of(_scan_parts, _quiet_solve),
    LINEAR_SOLVE: _linear_solve,
}
