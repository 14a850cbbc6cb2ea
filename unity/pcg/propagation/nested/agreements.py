"""Values that devices reduce inside nested programs, and choices of an equation derived from its nested programs.

Inside calls, branches and loops all devices reach the same point of the program together. They can therefore reduce a scalar there
that has no gradient, such as a predicate or a step count. The programs of a `custom_vjp` and of its rules are not differentiated at
all, so that there they can reduce any value, such as the scales of a quantized array. Each such reduction is an `Agreement`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from math import gcd, prod

from unity.pcg.ir.dead_code import descendants
from unity.pcg.ir.program import Body
from unity.pcg.propagation.nested.derivative_rules import VjpRule, served_operands
from unity.pcg.propagation.propagation import Solution, has_no_gradient, rounded_apart
from unity.pcg.propagation.specifications import summable_arrays
from unity.pcg.types.factors import Agreement, Differentiated, Match
from unity.pcg.types.parallel_type import State

UNDIFFERENTIATED, FORWARD, BACKWARD = 0, 1, 2  # the programs of a call in the path of an agreement: its own, and its rules


def as_match(solved: Iterable[tuple[Body, Solution]], operands: tuple[State, ...], results: tuple[State, ...]) -> Match:
    """Return the choice of an equation whose nested programs have these solutions.

    Args:
        solved: each nested program and its solution.
        operands, results: the states of the equation.
    """
    size, divided, ruled, rounds = 0, False, False, False
    agreed, forward, backward = list[Agreement](), list[Agreement](), list[Agreement]()
    for k, (body, solution) in enumerate(solved):
        all_equations = range(len(solution.matches))
        agreed += located_in(k, agreements(body, solution))
        forward += located_in(k, agreements(body, solution, all_equations))
        backward += located_in(k, backward_agreements(solution, all_equations))
        ruled = ruled or any(m.ruled is not None for m in solution.matches)
        rounds = rounds or bool(rounded_apart(body, solution))
        for match in solution.matches:
            size, divided = gcd(size, match.size), divided or bool(match.divided)
        for v in forwarded_inputs(body):  # no equation of the program limits how far they can be divided
            state = solution.states[v]
            if state.kind == "P":
                size = gcd(size, body.tensors[v].shape[state.dim] // state.outer)
                divided = divided or not body.equations  # a program without equations does no other work
    differentiated = Differentiated(tuple(forward), tuple(backward)) if ruled else None
    return Match("nested", operands, results, size, float(divided), rounds=rounds, agreed=tuple(agreed), ruled=differentiated)


def agreements(body: Body, solution: Solution, active: Container[int] = ()) -> Iterator[Agreement]:
    """Yield the agreements of a program with this solution, and those of the programs nested in it.

    Args:
        active: the numbers of the equations that are differentiated.
    """
    for v, kind in sorted(solution.reduced.items()):
        tensor = body.tensors[v]
        yield Agreement((v,), tensor.dtype, kind, prod(tensor.shape))
    yield from nested_agreements(solution, active)


def nested_agreements(solution: Solution, active: Container[int] = ()) -> Iterator[Agreement]:
    """Yield the agreements of the programs nested in a program, but none of the program itself.

    Args:
        active: the numbers of the equations that are differentiated.
    """
    for k, match in enumerate(solution.matches):
        yield from located_in(k, match.agreed if match.ruled is None or k not in active else match.ruled.forward)


def backward_agreements(solution: Solution, active: Container[int]) -> Iterator[Agreement]:
    """Yield the agreements in the backward rules of the `active` equations, those that are differentiated."""
    for k, match in enumerate(solution.matches):
        yield from located_in(k, match.ruled.backward if match.ruled is not None and k in active else ())


def rule_agreements(rule: VjpRule, solutions: tuple[Solution, Solution], results: int) -> Iterator[tuple[Agreement, ...]]:
    """Yield the agreements of a `custom_vjp`'s forward rule, and of its backward rule, each with the operands that it serves."""
    programs = zip((FORWARD, BACKWARD), (rule.forward, rule.backward), solutions, served_operands(rule, results), strict=True)
    for number, body, solution, served in programs:
        every = (*agreements(body, solution), *sliced_arrays(body, solution))
        direct = (replace(a, serves=served.get(a.where[0])) if len(a.where) == 1 else a for a in every)
        yield tuple(located_in(number, direct))


def sliced_arrays(body: Body, solution: Solution) -> Iterator[Agreement]:
    """Yield the arrays that this solution of an undifferentiated program divides, and that another one may reduce."""
    for v in summable_arrays(body):
        if solution.seen(v).kind == "P":
            yield Agreement((v,), body.tensors[v].dtype, "", prod(body.tensors[v].shape))


def repeated(match: Match, steps: int) -> Match:
    """Return the choice of a loop of `steps` steps, given the match of one step."""

    def times_steps(one_step: Iterable[Agreement]) -> tuple[Agreement, ...]:
        return tuple(replace(a, times=a.times * steps) for a in one_step)

    ruled = match.ruled and Differentiated(times_steps(match.ruled.forward), times_steps(match.ruled.backward))
    return replace(match, agreed=times_steps(match.agreed), ruled=ruled)


def located_in(number: int, inner: Iterable[Agreement]) -> Iterator[Agreement]:
    """Prefix the paths of agreements with the number of the equation, or of the nested program, that contains them."""
    return (replace(a, where=(number, *a.where)) for a in inner)


def forwarded_inputs(body: Body) -> tuple[int, ...]:
    """Return the inputs of a body that are also results of it, unchanged."""
    return tuple(a for a in body.inputs if a in body.outputs)


@lru_cache(maxsize=4096)
def constant_results(body: Body) -> frozenset[int]:
    """Return the results of a body that depend on none of its inputs, such as zeros."""
    dependent = descendants(body, body.inputs)
    return frozenset(a for a in body.outputs if isinstance(a, int) and a not in dependent)


def is_agreeable(body: Body, variable: int) -> bool:
    """Return whether devices may agree on a value inside control flow: it is a scalar without a gradient."""
    return body.tensors[variable].ndim == 0 and has_no_gradient(body, variable)


class RulePass(Enum):
    """The passes that run a program of a call with a derivative rule."""

    UNDIFFERENTIATED = "its own, where the call is not differentiated"
    FORWARD = "its forward rule"
    BACKWARD = "its backward rule"


@dataclass(frozen=True)
class CallArray:
    """An array inside of a call with a derivative rule, and the passes that compute it."""

    run: RulePass
    agreement: Agreement

    @property
    def key(self) -> tuple[RulePass, tuple[int, ...]]:
        """The identity of the array in all choices of one body."""
        return self.run, self.agreement.where


def call_arrays(solution: Solution) -> Iterator[CallArray]:
    """Yield the values that devices reduce inside of calls with derivative rules, or hold slices of: arrays, and scalars backward.

    Scalars elsewhere are among `Choice.reduced`.
    """
    for k, match in enumerate(solution.matches):
        if match.ruled is not None:
            parts = (
                (RulePass.UNDIFFERENTIATED, match.agreed),
                (RulePass.FORWARD, match.ruled.forward),
                (RulePass.BACKWARD, match.ruled.backward),
            )
            inside = ((run, a) for run, part in parts for a in located_in(k, part))
            yield from (CallArray(run, a) for run, a in inside if a.elements > 1 or run is RulePass.BACKWARD)
