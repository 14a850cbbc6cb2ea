"""OptCNN's strategies as a subset of the search's (Jia et al., ICML 2018, section 4), and the parts of a graph that are not layers.

A layer is split along dimensions of its output alone: no operator makes a partial sum that another would have to add up. (A loss,
which has no dimensions, is the sum of the contributions of its largest operand's pieces.) A layer's parameters are stored where the
layer needs them: along an axis that splits the layer so that every device needs its own part, each has that part; along the others
all devices have all of them, and synchronize. So weights are never gathered.

In the paper's graph nodes are layers and edges are the tensors between them. Here arguments, results and light operators are
variables too. Those at the rim, joined to one other variable alone, are part of the layer beside them, as parameters are in the
paper: their least cost is part of the layer's own cost (t_s, section 5.1).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from unity.baselines.flexflow.strategy.pieces import reference, split_of
from unity.baselines.restricted import without
from unity.search.cost.assembly import Assembled
from unity.search.cost.roofline import dense_work
from unity.search.solver.problem import Array, Cost, Problem
from unity.search.space.configurations import Domain
from unity.search.space.sites import Site, Sites, copies


def layerwise(assembled: Assembled) -> Problem:
    """Return the problem with OptCNN's strategies; all others have infinite cost."""
    whole, opened = assembled.problem, assembled.opened
    unary = list[Cost]()
    for site, domain, cost in zip(opened.sites, assembled.domains, whole.unary, strict=True):
        split = _splits_its_output(site, domain)
        unary.append(cost if split.all() else Cost("", np.where(split, cost.time, np.inf), cost.memory))
    parameters = _parameters(opened)
    gathered = {e: _gathered(assembled, s, p) for e, (s, p) in enumerate(assembled.ports) if parameters[whole.edges[e].first]}
    return without(replace(whole, unary=tuple(unary)), gathered)


def light(opened: Sites) -> list[bool]:
    """Return for every site whether it has no dense work, that is, no product or convolution."""
    bodies = [site.body for site in opened.sites]
    return [body is None or not dense_work(body)[0] for body in bodies]


def _splits_its_output(site: Site, domain: Domain) -> Array:
    """Return which values of an operator split only dimensions of its output; for other sites, all values."""
    if site.kind != "operator" or site.node is None:
        return np.ones(len(domain), bool)
    position = reference(site.node)
    good = np.array([c.name == "unused" or split_of(c, position) is not None for c in domain.choices])
    return np.all(good[domain.picks], axis=1)


def _parameters(opened: Sites) -> list[bool]:
    """Return for every site whether it is a parameter as it is stored, or a copy of one."""
    parameters: list[bool] = []
    for site in opened.sites:
        copied = copies(site) and parameters[site.ports[0].source]
        parameters.append(site.weight if site.kind == "input" else copied)
    return parameters


def _gathered(assembled: Assembled, s: int, p: int) -> Array:
    """Return which pairs of values change a port's operand along an axis that it is partitioned on, [producer's, user's]."""
    port = assembled.opened.sites[s].ports[p]
    before, first = assembled.domains[port.source].types[assembled.position(port)]
    after, second = assembled.domains[s].types[p]
    changed = np.array([[old.kind == "P" and old != new for new in after.states] for old in before.states], bool)
    return np.any(changed[before.rows[:, None, :], after.rows[None, :, :]], axis=-1)[first[:, None], second]
