"""The factor solver: extends known states along one axis to all variables of a body.

The legal parallelizations of a composite are not written down anywhere: they are derived by putting an axis on a factor of one of
its equations and following it through the others (`propagation`). The matches of an equation come from the operator table, or from
its nested programs if it is a call, a branch or a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from unity.pcg.ir.nested_programs import bodies
from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.jaxprs.jaxprs import CALLS, LINEAR_SOLVE, RULED
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.propagation.inner_reductions import regrouped, smallest_in_chain
from unity.pcg.propagation.nested import linear_solves as linear
from unity.pcg.propagation.nested.agreements import (
    FORWARD,
    UNDIFFERENTIATED,
    agreements,
    as_match,
    constant_results,
    is_agreeable,
    located_in,
    rule_agreements,
    sliced_arrays,
)
from unity.pcg.propagation.nested.conditionals import cond_matches
from unity.pcg.propagation.nested.derivative_rules import JvpRule, Unreadable, VjpRule, is_reverse_only, jvp_body, vjp_bodies
from unity.pcg.propagation.nested.loops import Loop, loop_matches, while_loop_of
from unity.pcg.propagation.nested.programs import branches, nested_body
from unity.pcg.propagation.propagation import (
    Conflict,
    Place,
    Propagation,
    Solution,
    Unmatched,
    cancels,
    contributions,
    rounded_apart,
)
from unity.pcg.propagation.specifications import rounding_results, spec_of
from unity.pcg.types.factors import TABLE, Differentiated, Match, Spec, facts_of, matching
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State, partitioned

ON_HOST = "pure_callback"  # JAX refuses to differentiate it


def solve(
    body: Body,
    known: Mapping[int, State],
    contributing: bool = False,
    scattering: int | None = None,
    undifferentiated: bool = False,
    patient: bool = True,
) -> Solution:
    """Extend known states to the whole body, reducing partial values only where necessary.

    An operand beside a partial sum is first assumed to be whole. If that has no solution, as for `tanh(x) * y.sum()` of partitioned
    `x` and `y`, its state is awaited, so that the sum is reduced.

    Raises Unmatched if the body has no solution.

    Args:
        body: the body to solve.
        known: states by variable.
        contributing: contribute whole values to partial sums, where possible, rather than reduce the sums.
        scattering: the dimension along which to reduce-scatter partial sums that have it, rather than reduce them.
        undifferentiated: whether no gradient flows through the body, so that devices may reduce a maximum.
        patient: whether to await such states if the first assumption has no solution.
    """
    problem = _Problem(body, tuple(known.items()), contributing, scattering, undifferentiated)
    solution = _outcome(problem, patient=False)
    if isinstance(solution, Unmatched) and solution.hasty and patient:
        solution = _outcome(problem, patient=True)
    if isinstance(solution, Unmatched):
        raise Unmatched(solution.contributing, solution.hasty)
    return solution


class _Problem(NamedTuple):
    """The arguments of `solve`, but for patience, as a cache key."""

    body: Body
    known: tuple[tuple[int, State], ...]
    contributing: bool
    scattering: int | None
    undifferentiated: bool


@lru_cache(maxsize=2048)
def _outcome(problem: _Problem, patient: bool) -> Solution | Unmatched:
    """Return the solution of a body with known states, or why it has no solution.

    The choices of a body ask for a third of its solutions twice or more, so those of the last few bodies are cached.
    """
    try:
        return _solve(problem.body, dict(problem.known), *problem[2:], patient)
    except Unmatched as failure:
        return Unmatched(failure.contributing, failure.hasty)  # without the frames that the exception refers to


def _solve(
    body: Body, known: Mapping[int, State], contributing: bool, scattering: int | None, undifferentiated: bool, patient: bool
) -> Solution:
    """Solve a body as `solve` does, with one order of its equations."""
    reduced: dict[int, str] = {}
    scattered: dict[int, State] = {}
    whole: set[int] = set()  # variables that turned out to be no sums once others were reduced
    contributed: set[Place] = set()
    may_contribute = hasty = False
    while True:
        unreduced = {v: s for v, s in known.items() if v not in reduced or s != REPLICATED}  # users see it reduced
        places, slices = contributed if contributing else None, None if scattering is None else scattered
        propagation = Propagation(body, unreduced, reduced, equation_matches, places, slices, patient, undifferentiated)
        try:
            solution = propagation.run()
        except Conflict as conflict:
            hasty = hasty or (propagation.hasty and not patient)
            if contributing and not conflict.places <= contributed:
                contributed |= conflict.places
                continue
            may_contribute = may_contribute or bool(conflict.places) or conflict.summed
            variable = None if conflict.variable is None else smallest_in_chain(body, conflict.variable, equation_matches)
            if variable is None or any(variable in some for some in (reduced, scattered, whole, body.inputs)):
                raise Unmatched(not contributing and may_contribute, hasty) from None
            if scattering is not None and _may_scatter(body, variable, scattering):
                scattered[variable] = partitioned(scattering)
            else:
                reduced[variable] = "sum"
                reduced = regrouped(body, reduced, (*scattered, *whole), equation_matches)
        else:
            stale = {v for v in (*reduced, *scattered) if solution.states[v] != PARTIAL}
            whole_values = all(solution.seen(a) == REPLICATED for a in contributions(body, solution))
            if not stale and whole_values and not cancels(body, solution):
                return solution
            if not stale:
                raise Unmatched
            whole |= stale
            reduced = {v: kind for v, kind in reduced.items() if v not in stale}
            scattered = {v: state for v, state in scattered.items() if v not in stale}


def _may_scatter(body: Body, variable: int, dim: int) -> bool:
    tensor = body.tensors[variable]
    return variable not in body.outputs and dim < tensor.ndim and tensor.shape[dim] > 1


def solve_either(body: Body, known: Mapping[int, State]) -> Solution:
    """Solve a body. Scatter sums inside or contribute values to them only if nothing else solves it, in this order."""
    try:
        return solve(body, known)
    except Unmatched as problem:
        failure = problem
    results = {a: known[a] for a in body.outputs if isinstance(a, int) and a in known}
    operands = {v: known[v] for v in body.inputs if v in known}
    for dim in scattering_dims(body, operands) if any(s.kind in "PS" for s in results.values()) else ():
        solution = scattering_solution(body, tuple(operands.items()), dim)
        if solution is not None and all(solution.states[a] == s for a, s in results.items()):
            return solution
    if not failure.contributing:
        raise failure
    return solve(body, known, contributing=True)


@lru_cache(maxsize=8192)
def scattering_solution(body: Body, operands: tuple[tuple[int, State], ...], dim: int) -> Solution | None:
    """Return the solution that scatters sums inside along a dimension, or None.

    The operands alone decide which sums are scattered, so the solution is the same whatever results are wanted.
    """
    with suppress(Unmatched):
        return solve(body, dict(operands), scattering=dim)
    return None


def scattering_dims(body: Body, known: Mapping[int, State]) -> Sequence[int]:
    """Return the dimensions along which to scatter sums inside a body: those of its largest partial input, the largest first."""
    partial = (body.tensors[v] for v in body.inputs if known.get(v) == PARTIAL)
    largest = max(partial, key=lambda tensor: tensor.nbytes, default=None)
    return () if largest is None else sorted(range(largest.ndim), key=lambda dim: -largest.shape[dim])


def equation_matches(body: Body, equation: Equation, known: Mapping[int, State]) -> Sequence[Match]:
    """Return the legal matches of an equation that agree with the known states of its positions."""
    n, m = len(equation.operands), len(equation.results)
    nested = NESTED.get(equation.name)
    if nested is not None:
        if all(s == REPLICATED for s in known.values()) and len(known) == n + m:
            replicated = Match("replicated", (REPLICATED,) * n, (REPLICATED,) * m, 0, 0.0, rounds=_rounds_inside(equation))
            return [replicated] if is_replicable_call(equation) else []
        return _nested_matches(_NestedQuery(TABLE.version, equation.signature, equation.identity, tuple(known.items()), equation))
    matches = matching(spec_of(body, equation) or Spec(()), known, n, m)
    return [match for match in matches if match.name != "replicated"] if facts_of(equation.name).invariant else matches


@dataclass(frozen=True)
class _NestedQuery:
    """An equation with nested programs and the known states around it; equal queries have the same matches."""

    table: int  # the version of the operator table
    signature: str
    identity: tuple[int, ...]
    known: tuple[tuple[int, State], ...]
    equation: Equation = field(compare=False)


@lru_cache(maxsize=16384)
def _nested_matches(query: _NestedQuery) -> tuple[Match, ...]:
    """Return the matches of an equation with nested programs, computed once for all equal layers of all programs."""
    return tuple(NESTED[query.equation.name](query.equation, dict(query.known)))


@lru_cache(maxsize=8192)
def replicable(body: Body) -> bool:
    """Return whether a body can be replicated for use, so that its cotangents are partial sums.

    A custom_vjp or the solver of a linear solve may not be linear in them, and neither may a primitive without an entry, since JAX
    may not know that its results differ between devices. A callback on the host has no cotangents.
    """
    return all(
        is_replicable_call(e) if e.name in NESTED else e.name == ON_HOST or (e.name in TABLE and not facts_of(e.name).invariant)
        for e in body.equations
    )


@lru_cache(maxsize=8192)
def rounds_cotangents(body: Body) -> bool:
    """Return whether the derivative of a body rounds cotangents, in nested programs too, so that these may not be partial sums.

    JAX does not differentiate a `while` backward, and the rule of a `custom_vjp` is solved as a separate program.
    """
    inside = (e for e in body.equations if e.name in NESTED)
    return bool(rounding_results(body)) or any(map(_rounds_inside, inside))


def _rounds_inside(equation: Equation) -> bool:
    """Return whether the derivative of an equation with nested programs rounds cotangents."""
    if equation.undifferentiated or equation.name == "while" or is_reverse_only(equation):
        return False
    programs = [jvp_body(equation).body] if equation.name == "custom_jvp_call" else bodies(equation)
    return any(map(rounds_cotangents, programs))


def is_replicable_call(equation: Equation) -> bool:
    """Return whether an equation with nested programs can be replicated for use."""
    if is_reverse_only(equation):
        operands, results = ((REPLICATED,) * len(atoms) for atoms in (equation.operands, equation.results))
        rule = derivative_agreements(equation, operands, results)
        if rule is None or any(a.kind for a in (*rule.forward, *rule.backward)):
            return False
        solutions = vjp_solutions(equation, operands, results)
        # A contributed result comes from the first device along an axis alone, which may not run a call in a branch or a stage.
        return solutions is not None and not solutions[1].contributed_results
    if equation.name == "cond":
        return all(map(replicable, branches(equation)))
    if equation.name == LINEAR_SOLVE:
        programs = (linear.solve_program(equation, name) for name in linear.program_names(equation))
        return _solves_sums(equation) and all(map(replicable, programs))
    if equation.name == "custom_jvp_call":
        return equation.undifferentiated or not _refuses_partial_sums(jvp_body(equation).body)
    return equation.name == "while" or replicable(nested_body(equation))


def _refuses_partial_sums(body: Body) -> bool:
    """Return whether partial sums cannot pass a derivative rule.

    JAX cannot run some primitives on operands that differ between devices, and some linear solves do not solve sums, in the rule
    or in a program nested in it.
    """
    return any(
        facts_of(e.name).invariant or (e.name == LINEAR_SOLVE and not _solves_sums(e)) or any(map(_refuses_partial_sums, bodies(e)))
        for e in body.equations
    )


def _solves_sums(equation: Equation) -> bool:
    """Return whether a linear solve returns the partial sums of its solutions for partial sums of its right sides."""
    return linear.solves_partial_sums(_solve_nested, equation, dict.fromkeys(range(len(equation.operands)), REPLICATED))


def _call_matches(equation: Equation, known: Mapping[int, State]) -> Iterator[Match]:
    """Yield the match, if there is one, of a custom_jvp_call, a custom_vjp_call or a remat.

    Both its program and its derivative rule must agree with it.
    """
    body = nested_body(equation)
    n = len(equation.operands)
    atoms = {p: (body.inputs[p] if p < n else body.outputs[p - n]) for p in known}
    ruled = is_reverse_only(equation)
    solution = _solve_nested(body, {v: known[p] for p, v in atoms.items() if isinstance(v, int)}, ruled)
    if solution is None:
        return
    operands = _with_unread_operands(equation, body, solution, known)
    solution = _with_constant_results(equation, body, solution, operands, atoms)
    rule = derivative_agreements(equation, operands, solution.results)
    if rule is not None:
        match = as_match([(body, solution)], operands, solution.results)
        if ruled:
            arrays = located_in(UNDIFFERENTIATED, sliced_arrays(body, solution))
            match = replace(match, agreed=(*match.agreed, *arrays))
        ruled_by = {"rounds": rule.rounds, "ruled": None if equation.undifferentiated else rule}
        yield match if equation.name not in RULED else replace(match, **ruled_by)


def _with_constant_results(
    equation: Equation, body: Body, solution: Solution, operands: tuple[State, ...], atoms: Mapping[int, Any]
) -> Solution:
    """Return a call's solution with its constant results in the states that the rule of a `custom_jvp` produces.

    A result that depends on no operand can be in any state; the rule may need it partitioned, beside tangents that are.
    """
    free = constant_results(body) - {v for v in atoms.values() if isinstance(v, int)}
    if not free or equation.undifferentiated or equation.name != "custom_jvp_call" or is_reverse_only(equation):
        return solution
    rule = jvp_body(equation)
    inputs = operands + tuple(s for s, float_ in zip(operands, rule.floating, strict=True) if float_)
    boundary = zip(rule.body.outputs, body.outputs, solution.results, strict=False)
    fixed = {a: s for a, v, s in boundary if v not in free and isinstance(a, int) and a not in rule.body.inputs}
    ruled = _solve_nested(rule.body, dict(zip(rule.body.inputs, inputs, strict=True)) | fixed)
    if ruled is None:
        return solution
    results = zip(body.outputs, ruled.results, strict=False)
    partitioned = {v: s for v, s in results if isinstance(v, int) and v in free and s.kind == "P"}
    known = dict(zip(body.inputs, operands, strict=True)) | partitioned
    return (_solve_nested(body, known) if partitioned else None) or solution


def _with_unread_operands(equation: Equation, body: Body, solution: Solution, known: Mapping[int, State]) -> tuple[State, ...]:
    """Return the states of a call's operands, those that only its derivative rule reads in the states that the rule needs.

    The rule of a factorization, for example, may take the matrix beside its factors.
    """
    unread = [k for k, v in enumerate(body.inputs) if k not in known and v not in body.touching and v not in body.outputs]
    if not unread or equation.name not in RULED or equation.undifferentiated:
        return solution.operands
    try:
        if not is_reverse_only(equation):
            return _as_tangents(jvp_body(equation), solution, unread)
        rule = vjp_bodies(equation)
    except Unreadable:
        return solution.operands
    first, back, n = rule.forward, rule.backward, len(solution.results)
    forward = _solve_nested(first, {v: solution.operands[k] for k, v in enumerate(first.inputs) if k not in unread}, True)
    if forward is None or not _has_results(first, forward, solution.results):
        return solution.operands
    operands = list(forward.operands)
    inputs = (*forward.results[n:], *map(dual, solution.results))
    backward = _solve_nested(back, dict(zip(back.inputs, inputs, strict=True)), True)
    cotangents = iter(backward.results if backward is not None else ())
    residuals = {a for a, v in zip(first.outputs[n:], back.inputs, strict=False) if v in back.touching}
    for k, cotangent in zip((k for k, f in enumerate(rule.floating) if f), cotangents, strict=False):
        v = first.inputs[k]
        if k in unread and cotangent.kind == "P" and v not in first.touching and v not in residuals:
            operands[k] = cotangent  # no rule reads it, so it has its gradient's state
    return tuple(operands)


def _as_tangents(rule: JvpRule, solution: Solution, unread: Collection[int]) -> tuple[State, ...]:
    """Return the states of a `custom_jvp`'s operands, those that only its rule reads, or their tangents, as the rule needs them.

    A quadratic form of an inverse, for example, may take the matrix, whose tangent alone is read, beside its factor.
    """
    n, inputs = len(solution.operands), rule.body.inputs
    variables = [[v] for v in inputs[:n]]  # of each operand, and of its tangent
    for k, tangent in zip((k for k, f in enumerate(rule.floating) if f), inputs[n:], strict=True):
        variables[k].append(tangent)
    known = {v: s for k, s in enumerate(solution.operands) if k not in unread for v in variables[k]}
    ruled = _solve_nested(rule.body, known | _result_states(rule.body, solution.results * 2))
    if ruled is None:
        return solution.operands
    read = {k: [v for v in variables[k] if v in rule.body.touching] for k in unread}
    return tuple(ruled.states[read[k][0]] if read.get(k) else s for k, s in enumerate(solution.operands))


def derivative_agreements(equation: Equation, operands: tuple[State, ...], results: tuple[State, ...]) -> Differentiated | None:
    """Return the agreements of a call's derivative rule; None if the rule, run on pieces, does not return pieces of the derivative.

    A tangent has the state of its primal, a cotangent the dual one (partial for replicated, replicated for partial).
    """
    if equation.undifferentiated:
        return Differentiated()
    try:
        if is_reverse_only(equation):
            solutions = vjp_solutions(equation, operands, results)
            if solutions is None:
                return None
            forward, backward = rule_agreements(vjp_bodies(equation), solutions, len(results))
            return Differentiated(forward, backward)
        if equation.name == "custom_jvp_call":
            rule = jvp_body(equation)
            tangents = tuple(s for s, float_ in zip(operands, rule.floating, strict=True) if float_)
            known = dict(zip(rule.body.inputs, operands + tangents, strict=True))
            solution = _solve_nested(rule.body, known | _result_states(rule.body, results + results))
            if solution is None or not _has_results(rule.body, solution, results + results):
                return None
            forward = tuple(located_in(FORWARD, agreements(rule.body, solution)))
            return Differentiated(forward, rounds=bool(rounded_apart(rule.body, solution)))
    except Unreadable:
        return None
    return Differentiated()


def _has_results(body: Body, solution: Solution, expected: Sequence[State]) -> bool:
    """Return whether a program's first results are in the expected states; literals, such as tangents of integers, are whole."""
    results = zip(body.outputs, solution.results, expected, strict=False)
    return all(s == e if isinstance(a, int) else e == REPLICATED for a, s, e in results)


def _result_states(body: Body, states: Sequence[State]) -> dict[int, State]:
    """Return states for the results of a body by variable, but for its inputs: a constant can be produced in any state."""
    return {a: s for a, s in zip(body.outputs, states, strict=True) if isinstance(a, int) and a not in body.inputs}


def vjp_solutions(equation: Equation, operands: tuple[State, ...], results: tuple[State, ...]) -> tuple[Solution, Solution] | None:
    """Return the solutions of a custom_vjp's forward and backward programs along one axis; None if either has none.

    Residuals that depend on no operand, such as a mask, are whole if the backward program takes them so; otherwise the forward
    program produces them in the states that it takes.
    """
    rule, count = vjp_bodies(equation), len(results)
    primals = dict(zip(rule.forward.inputs, operands, strict=True))
    forward = _solve_nested(rule.forward, primals, True)
    if forward is None or not _has_results(rule.forward, forward, results):
        return None
    residuals = list(zip(rule.backward.inputs, rule.forward.outputs[count:], forward.results[count:], strict=False))
    known = {v: s if isinstance(a, int) else REPLICATED for v, a, s in residuals}  # a literal is whole
    backward = _backward_solution(rule, known, operands, results)
    constant = constant_results(rule.forward).difference(rule.forward.outputs[:count])
    free = {v: a for v, a, _ in residuals if isinstance(a, int) and a in constant}
    if backward is None and free:
        backward = _backward_solution(rule, {v: s for v, s in known.items() if v not in free}, operands, results)
        produced = {a: backward.states[v] for v, a in free.items()} if backward is not None else {}
        forward = _solve_nested(rule.forward, primals | produced, True)
    if forward is None or backward is None or not _has_results(rule.forward, forward, results):
        return None
    handed = dict(zip(rule.backward.inputs, forward.results[count:], strict=False))
    return (forward, backward) if all(backward.states[v] == handed[v] for v in free) else None


def _backward_solution(
    rule: VjpRule, residuals: Mapping[int, State], operands: tuple[State, ...], results: tuple[State, ...]
) -> Solution | None:
    """Return the solution of a custom_vjp's backward program, from states of residuals and of the call's operands and results.

    A replicated operand's cotangent is a partial sum. Some rules compute all of it on every device instead, such as one that
    returns the next scale of an array in 8 bits in the place of a gradient. Then the first device contributes it.
    """
    inputs = rule.backward.inputs
    known = dict(residuals) | dict(zip(inputs[len(inputs) - len(results) :], map(dual, results), strict=True))
    expected = [dual(s) for s, float_ in zip(operands, rule.floating, strict=True) if float_]
    goals = {a: s for a, s in zip(rule.backward.outputs, expected, strict=True) if isinstance(a, int) and a not in known}
    without_sums = {a: s for a, s in goals.items() if s != PARTIAL}
    for results_of_rule in (goals, without_sums):
        solution = _solve_nested(rule.backward, known | results_of_rule, True)
        if solution is not None and (contributing := _with_contributions(rule.backward, solution, expected)) is not None:
            return contributing
    return None


def _with_contributions(body: Body, solution: Solution, expected: Sequence[State]) -> Solution | None:
    """Return a solution if its results are in the expected states, or can be; else None.

    Where a partial sum is expected and every device computes the whole value, the first device contributes it. A zero literal is a
    partial sum already.
    """

    def state(a: Atom, s: State, e: State) -> State:
        return s if isinstance(a, int) else PARTIAL if a.zero and e == PARTIAL else REPLICATED

    ends = [(state(a, s, e), e) for a, s, e in zip(body.outputs, solution.results, expected, strict=True)]
    whole = frozenset(k for k, end in enumerate(ends) if end == (REPLICATED, PARTIAL))
    if any(s != e for k, (s, e) in enumerate(ends) if k not in whole):
        return None
    return replace(solution, results=tuple(expected), contributed_results=whole) if whole else solution


def call_solutions(
    equation: Equation, operands: tuple[State, ...], results: tuple[State, ...]
) -> tuple[Solution, Solution, Solution] | None:
    """Return the solutions of a custom_vjp's own, forward and backward programs along one axis; None if any has none."""
    body = nested_body(equation)
    known = dict(zip(body.inputs, operands, strict=True)) | _result_states(body, results)
    own, ruled = _solve_nested(body, known, undifferentiated=True), vjp_solutions(equation, operands, results)
    return None if own is None or ruled is None else (own, *ruled)


def dual(state: State) -> State:
    """Return the state of the cotangent of a value in a state."""
    return {"R": PARTIAL, "S": REPLICATED}.get(state.kind, state)


def _solve_nested(body: Body, known: Mapping[int, State], undifferentiated: bool = False) -> Solution | None:
    """Return a solution of a nested program, or None if it would need a halo or a Reduce.

    Scalars without a gradient, such as predicates, may be reduced: all devices reach the same point of the program together, so
    that they can agree on them. Outside the program such a value is whole. So may any value of a program that no gradient flows
    through.
    """
    try:
        solution = solve(body, known, undifferentiated=undifferentiated)
    except Unmatched:
        return None
    if any(m.halo for m in solution.matches):
        return None
    if not undifferentiated and not all(is_agreeable(body, v) for v in solution.reduced):
        return None
    if not solution.reduced:
        return solution
    results = (REPLICATED if a in solution.reduced else s for a, s in zip(body.outputs, solution.results, strict=True))
    return replace(solution, results=tuple(results))


@lru_cache(maxsize=1024)
def _scan_loop_of(equation: Equation) -> Loop:
    """Return the loop of a `scan` equation."""
    return Loop(nested_body(equation), *constants_and_carry(equation.params), steps=equation.params["length"])


NESTED: dict[str, Callable[[Equation, Mapping[int, State]], Any]] = {
    **dict.fromkeys(CALLS, _call_matches),
    "cond": partial(cond_matches, _solve_nested),
    "while": loop_matches(while_loop_of, _solve_nested),
    "scan": loop_matches(_scan_loop_of, _solve_nested),
    LINEAR_SOLVE: partial(linear.linear_solve_matches, _solve_nested),
}
