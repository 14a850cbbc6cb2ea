"""A lower bound on the simulated step of every strategy of a serial graph: the seconds that a device computes at least.

A device runs one operator after the other, so no step is shorter than the sum of its operators, however its communication overlaps.
Each operator is taken in its fastest value, whatever its neighbours are in, and however much memory that takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from math import comb, prod

import numpy as np

from unity.pcg.types.axis import Axis
from unity.search.cost.assembly import Assembled
from unity.search.cost.cost import computing_seconds, forward_runs
from unity.search.solver.problem import Array
from unity.search.space.configurations import Domain, domain_of_picks, legal, shapes_of
from unity.search.space.sites import Site

VALUES = 200_000  # the most values of an operator that are priced


def least_computing(assembled: Assembled) -> float | None:
    """Return the seconds that each device computes at least in a step.

    Constraints of the user are not considered, but stages of pipelines are.

    Args:
        assembled: The problem of the graph, with any of its values.

    Returns:
        The bound; None if the machine has too many axes to consider every value.
    """
    machine, training = assembled.machine, assembled.training
    least: dict[int, float] = {}  # by id of the cost: equal sites share one
    for site, domain, cost in zip(assembled.opened.sites, assembled.domains, assembled.costs, strict=True):
        body = None if site.node is None else site.node.body
        if body is not None and id(cost) not in least:
            picks = _picks(site, domain, machine.axes)
            if picks is None:
                return None
            every = domain_of_picks(domain.choices, picks, shapes_of(site), machine.axes)
            forward, backward = computing_seconds(site, body, every, machine, training)
            alone = float((forward * forward_runs(site) + backward * site.times).min())
            least[id(cost)] = alone + site.times * sum(site.stacking.seconds(machine.device.launch))
    return sum(least.get(id(cost), 0.0) for cost in assembled.costs)


def _picks(site: Site, domain: Domain, axes: Sequence[Axis]) -> Array | None:
    """Return the legal values of a site, one of those that differ in the order of equal axes alone; None if there are too many."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for k, axis in enumerate(axes):
        groups.setdefault((axis.extent, axis.size, axis.name in site.along), []).append(k)
    numbers = range(len(domain.choices))
    if prod(comb(len(numbers) + len(group) - 1, len(group)) for group in groups.values()) > VALUES:
        return None
    picks = np.zeros((1, len(axes)), np.int16)
    for group in groups.values():
        more = np.array(list(combinations_with_replacement(numbers, len(group))), np.int16)
        picks = np.repeat(picks, len(more), axis=0)
        picks[:, group] = np.tile(more, (len(picks) // len(more), 1))
    return picks[legal(site, domain.choices, picks, axes)]
