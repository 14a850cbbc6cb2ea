"""Refinement: a local search in the neighbourhood of points of the first search.

The first search leaves values out: on large machines those with many different choices, and everywhere all but one order of the
choices on interchangeable axes. Refinement considers them in a neighbourhood. Every site may take a value that an equal site uses,
one that differs from it on one axis, or one with two axes exchanged. All sites change together, so a whole region of the graph
can move from one axis to another. The neighbourhood contains the old point, so the result is never worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations

import numpy as np

from unity.search.cost.assembly import Assembled
from unity.search.cost.cost import site_cost
from unity.search.solver.problem import Point
from unity.search.space.configurations import domain_of_picks, legal, shapes_of
from unity.search.space.masks import allowed

GAIN = 1e-4  # relative gain below which no further round follows
ROUNDS = 12

Solve = Callable[[Assembled], Point | None]
Measure = Callable[[Point], float]  # the objective to be minimized


def refined(
    assembled: Assembled, point: Point, solve: Solve, measure: Measure, more: Iterable[Point] = ()
) -> tuple[Assembled, Point]:
    """Minimize in the neighbourhood of a point, then of the result, as long as that gains; return the last problem and its point.

    Args:
        assembled: The problem of the point.
        point: The point to begin with.
        solve: Minimizes a problem.
        measure: The objective by which points are compared.
        more: Points whose neighbourhoods are added in the first round.
    """
    others = list(more)
    for _ in range(0 if assembled.whole else ROUNDS):
        near, others = around(assembled, [(assembled, p) for p in (point, *others)]), []
        optimum = solve(near)
        before, after = measure(point), measure(optimum) if optimum else np.inf
        if optimum is None or after >= before:
            break
        assembled, point = near, optimum
        if before - after < GAIN * abs(before):
            break
    return assembled, point


def around(assembled: Assembled, points: Iterable[tuple[Assembled, Point]]) -> Assembled:
    """Return the problem whose domains are the values that some points use and their neighbours.

    Args:
        assembled: The problem whose graph, sites and masks are used.
        points: Points, each with the problem that it belongs to.
    """
    entries = tuple(points)
    classes: dict[int, list[int]] = {}
    for s, old in enumerate(assembled.domains):
        classes.setdefault(id(old), []).append(s)
    domains, costs = list(assembled.domains), list(assembled.costs)
    machine = assembled.machine
    for equal in classes.values():
        site, choices = assembled.opened.sites[equal[0]], domains[equal[0]].choices
        used = np.unique([problem.domains[s].picks[point.values[s]] for problem, point in entries for s in equal], axis=0)
        picks = neighbours(used, len(choices), machine.axes)
        mask = domains[equal[0]].mask
        picks = allowed(mask, choices, picks[legal(site, choices, picks, machine.axes)], machine.axes)
        near = domain_of_picks(choices, picks, shapes_of(site), machine.axes, mask=mask)
        cost = site_cost(site, near, machine, assembled.training)
        for s in equal:
            domains[s], costs[s] = near, cost
    return replace(assembled, domains=tuple(domains), costs=tuple(costs))


def neighbours(picks: np.ndarray, choices: int, axes: tuple) -> np.ndarray:
    """Return picks, those with another choice on one axis, and those with the choices of two axes of equal size exchanged."""
    variants = [picks]
    for k in range(len(axes)):
        changed = np.repeat(picks, choices, axis=0)
        changed[:, k] = np.tile(np.arange(choices), len(picks))
        variants.append(changed)
    for i, j in combinations(range(len(axes)), 2):
        if axes[i].size == axes[j].size:
            exchanged = picks.copy()
            exchanged[:, [i, j]] = picks[:, [j, i]]
            variants.append(exchanged)
    return np.unique(np.concatenate(variants), axis=0)
