"""A second look around what a search found: the values that it used, and those that differ from them a little.

A first search leaves values out: on large machines those with many different choices, and everywhere all but one order of the
choices on interchangeable axes. They are looked at here, where it matters. Every site may take the values that its equals use,
with any choice on any one axis, or with two axes exchanged. All sites change together, so that a whole region of the graph can
turn from one axis to another. The old point is among the new ones: nothing gets worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations

import numpy as np

from unity.search.cost.assembly import Assembled
from unity.search.cost.cost import site_cost
from unity.search.solver.problem import Point
from unity.search.space.configurations import legal, made, shapes_of
from unity.search.space.masks import left

GAIN = 1e-4  # what a round must have gained, relatively, for another one
ROUNDS = 12

Solve = Callable[[Assembled], Point | None]
Measure = Callable[[Point], float]  # what is to be small


def refined(
    assembled: Assembled, point: Point, solve: Solve, measure: Measure, more: Iterable[Point] = ()
) -> tuple[Assembled, Point]:
    """Looks around a point, and then around what is found there, as long as it gains. `more`: also around these, the first time."""
    others = list(more)
    for _ in range(0 if assembled.whole else ROUNDS):
        near, others = around(assembled, [(assembled, p) for p in (point, *others)]), []
        found = solve(near)
        before, after = measure(point), measure(found) if found else np.inf
        if found is None or after >= before:
            break
        assembled, point = near, found
        if before - after < GAIN * abs(before):
            break
    return assembled, point


def around(assembled: Assembled, found: Iterable[tuple[Assembled, Point]]) -> Assembled:
    """The same graph with other domains: values that points use, each of a problem of its own, and their neighbours."""
    every = tuple(found)
    alike: dict[int, list[int]] = {}
    for s, old in enumerate(assembled.domains):
        alike.setdefault(id(old), []).append(s)
    domains, costs = list(assembled.domains), list(assembled.costs)
    machine = assembled.machine
    for same in alike.values():
        site, choices = assembled.opened.sites[same[0]], domains[same[0]].choices
        used = np.unique([one.domains[s].picks[point.values[s]] for one, point in every for s in same], axis=0)
        picks = neighbours(used, len(choices), machine.axes)
        mask = domains[same[0]].mask
        picks = left(mask, choices, picks[legal(site, choices, picks, machine.axes)], machine.axes)
        near = made(choices, picks, shapes_of(site), machine.axes, mask=mask)
        cost = site_cost(site, near, machine, assembled.training)
        for s in same:
            domains[s], costs[s] = near, cost
    return replace(assembled, domains=tuple(domains), costs=tuple(costs))


def neighbours(picks: np.ndarray, choices: int, axes: tuple) -> np.ndarray:
    """Picks, those with another choice on one axis, and those with the choices of two axes of one size exchanged."""
    found = [picks]
    for k in range(len(axes)):
        changed = np.repeat(picks, choices, axis=0)
        changed[:, k] = np.tile(np.arange(choices), len(picks))
        found.append(changed)
    for i, j in combinations(range(len(axes)), 2):
        if axes[i].size == axes[j].size:
            exchanged = picks.copy()
            exchanged[:, [i, j]] = picks[:, [j, i]]
            found.append(exchanged)
    return np.unique(np.concatenate(found), axis=0)
