"""An upper bound on the number of slices of each argument under the user's constraints, without a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity.machine.machine import Machine
from unity.pcg.propagation.choice import Choice
from unity.search.space.configurations import ranks
from unity.search.space.dimensions import ProgramDimensions
from unity.search.space.masks import Mask, Restrict, marked
from unity.search.space.offers import offered
from unity.search.space.sites import Site, Sites


def most_slices(opened: Sites, machine: Machine, restrict: Restrict) -> Mapping[int, float]:
    """Return the most slices that constraints allow of each constrained argument, by `id` of its node.

    Args:
        opened: The sites of a program.
        machine: The devices.
        restrict: The user's constraints. Marks in the program, which are the default, constrain no arguments.
    """
    if restrict is marked:
        return {}
    offers = offered(opened.sites)
    masks = restrict(ProgramDimensions(opened, offers, ranks(opened.sites, offers)), machine)
    inputs = [(s, site) for s, site in enumerate(opened.sites) if site.kind == "input" and masks.get(s)]
    return {id(site.node): _most_slices(site, offers[s], masks[s], machine) for s, site in inputs}


def _most_slices(site: Site, choices: Sequence[Choice], mask: Mask, machine: Machine) -> float:
    """Return a bound on the slices of a site's result: of all axes that may slice it, and of what each rule allows."""
    most = 1
    for k, axis in enumerate(machine.axes):
        there = [site.staged] if site.staged is not None and axis.name in site.along else choices
        if any(c.states[len(site.ports)].kind == "P" and all(rule.may_use(c, k) for rule in mask) for c in there):
            most *= axis.size
    return min(most, *(rule.most_slices for rule in mask))
