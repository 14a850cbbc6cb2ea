"""What a program inside of an equation says of it, as one choice of the equation; and what devices agree on inside of it.

Inside of calls, branches and loops all devices are at the same place of the program. So they can reduce there what is a single
number without a gradient, such as what a predicate says, or how many steps were taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import gcd

from unity.pcg.body import Body
from unity.pcg.factors import Agreement, Match
from unity.pcg.propagation import Solution, stopped
from unity.pcg.state import State


def as_match(solved: Iterable[tuple[Body, Solution]], operands: tuple[State, ...], results: tuple[State, ...]) -> Match:
    """A choice of an equation, given how each of its programs runs then."""
    size, divided, agreed = 0, False, list[Agreement]()
    for k, (body, solution) in enumerate(solved):
        agreed += (replace(a, where=(k, *a.where)) for a in agreements(body, solution))
        for match in solution.matches:
            size, divided = gcd(size, match.size), divided or bool(match.divided)
        for v in handed_on(body):  # no equation of the program says how far these can be divided
            state = solution.states[v]
            if state.kind == "P":
                size = gcd(size, body.tensors[v].shape[state.dim] // state.outer)
                divided = divided or not body.equations  # then to hand on is all the work there is
    return Match("nested", operands, results, size, float(divided), agreed=tuple(agreed))


def agreements(body: Body, solution: Solution) -> Iterator[Agreement]:
    """What devices agree on inside of a program that runs so, and inside of the programs in it."""
    for v, kind in sorted(solution.reduced.items()):
        yield Agreement((v,), body.tensors[v].itemsize, kind)
    yield from nested_agreements(solution)


def nested_agreements(solution: Solution) -> Iterator[Agreement]:
    """The same, inside of the programs in it alone."""
    for k, match in enumerate(solution.matches):
        yield from (replace(a, where=(k, *a.where)) for a in match.agreed)


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
