"""What a program inside of an equation says of it, as one choice of the equation; and what devices agree on inside of it.

Inside of calls, branches and loops all devices are at the same place of the program. So they can reduce there what is a single
number without a gradient, such as what a predicate says, or how many steps were taken.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import gcd

from unity.pcg.ir.program import Body
from unity.pcg.propagation.propagation import Solution, stopped
from unity.pcg.types.factors import Agreement, Differentiated, Match
from unity.pcg.types.parallel_type import State


def as_match(solved: Iterable[tuple[Body, Solution]], operands: tuple[State, ...], results: tuple[State, ...]) -> Match:
    """A choice of an equation, given how each of its programs runs then."""
    size, divided, ruled = 0, False, False
    agreed, forward, backward = list[Agreement](), list[Agreement](), list[Agreement]()
    for k, (body, solution) in enumerate(solved):
        every = range(len(solution.matches))
        agreed += _in(k, agreements(body, solution))
        forward += _in(k, agreements(body, solution, every))
        backward += _in(k, backward_agreements(solution, every))
        ruled = ruled or any(m.ruled is not None for m in solution.matches)
        for match in solution.matches:
            size, divided = gcd(size, match.size), divided or bool(match.divided)
        for v in handed_on(body):  # no equation of the program says how far these can be divided
            state = solution.states[v]
            if state.kind == "P":
                size = gcd(size, body.tensors[v].shape[state.dim] // state.outer)
                divided = divided or not body.equations  # then to hand on is all the work there is
    instead = Differentiated(tuple(forward), tuple(backward)) if ruled else None
    return Match("nested", operands, results, size, float(divided), agreed=tuple(agreed), ruled=instead)


def agreements(body: Body, solution: Solution, moving: Container[int] = ()) -> Iterator[Agreement]:
    """What devices agree on inside of a program that runs so, and inside of the programs in it.

    `moving`: which of its equations are differentiated.
    """
    for v, kind in sorted(solution.reduced.items()):
        yield Agreement((v,), body.tensors[v].itemsize, kind)
    yield from nested_agreements(solution, moving)


def nested_agreements(solution: Solution, moving: Container[int] = ()) -> Iterator[Agreement]:
    """The same, inside of the programs in it alone."""
    for k, match in enumerate(solution.matches):
        yield from _in(k, match.agreed if match.ruled is None or k not in moving else match.ruled.forward)


def backward_agreements(solution: Solution, moving: Container[int]) -> Iterator[Agreement]:
    """What devices agree on in the backward rules of those equations of a program that are differentiated."""
    for k, match in enumerate(solution.matches):
        yield from _in(k, match.ruled.backward if match.ruled is not None and k in moving else ())


def repeated(match: Match, steps: int) -> Match:
    """A choice of a loop that takes so many steps, given what one step agrees on."""

    def more(some: Iterable[Agreement]) -> tuple[Agreement, ...]:
        return tuple(replace(a, times=a.times * steps) for a in some)

    ruled = match.ruled and Differentiated(more(match.ruled.forward), more(match.ruled.backward))
    return replace(match, agreed=more(match.agreed), ruled=ruled)


def _in(number: int, some: Iterable[Agreement]) -> Iterator[Agreement]:
    """Agreements in a program, or an equation, of what is around."""
    return (replace(a, where=(number, *a.where)) for a in some)


def handed_on(body: Body) -> tuple[int, ...]:
    """The inputs of a body that are its results as they are."""
    return tuple(a for a in body.inputs if a in body.outputs)


@lru_cache(maxsize=4096)
def constant_results(body: Body) -> frozenset[int]:
    """The results of a body that depend on none of its inputs, such as zeros."""
    moving = set(body.inputs)
    for e in body.equations:
        if not moving.isdisjoint(a for a in e.operands if isinstance(a, int)):
            moving.update(e.results)
    return frozenset(a for a in body.outputs if isinstance(a, int) and a not in moving)


def agreeable(body: Body, variable: int) -> bool:
    """Whether devices may agree on a value inside of control flow."""
    return body.tensors[variable].ndim == 0 and stopped(body, variable)
