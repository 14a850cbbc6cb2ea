"""Unity's ablation (section 6.3, figure 15a): parallelism without reduction dimensions, and without attention heads.

*Data and model parallelism* is what splits samples, or the results of products with weights. *Reduction* adds what splits
contracted dimensions, so that results are partial sums; *attention heads* adds what splits products without weights along anything
but samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from unity.baselines.by_hand import product_with_weight
from unity.baselines.restricted import RestrictedSpace, Structure
from unity.pcg.propagation.choice import Choice
from unity.pcg.types.factors import facts_of
from unity.search.cost.cost import site_cost
from unity.search.space.configurations import domain
from unity.search.space.sites import Site


@dataclass(frozen=True)
class Dimensions:
    """Which dimensions may be split, besides samples and the results of products with weights."""

    reduction: bool
    heads: bool


ABLATION = {
    "data+model": Dimensions(False, False),
    "data+model+reduction": Dimensions(True, False),
    "data+model+reduction+heads": Dimensions(True, True),
}
PIPELINE = "data+model+reduction+heads+pipeline"  # is no restriction: all that there is, and `unity.optimize`'s pipelines besides


def space(structure: Structure, may: Dimensions) -> RestrictedSpace:
    """The strategies that split only these dimensions."""
    base, shared = structure.search.assembled, {}
    domains, costs = [], []
    for s, site in enumerate(base.opened.sites):
        kept = tuple(k for k, c in enumerate(structure.choices[s]) if allowed(structure, s, site, c, structure.rank[s][k], may))
        same = id(base.domains[s]), kept
        if same not in shared:
            rank = tuple(structure.rank[s][k] for k in kept)
            found = domain(site, tuple(structure.choices[s][k] for k in kept), rank, base.machine.axes)
            shared[same] = found, site_cost(site, found, base.machine, base.training)
        domains.append(shared[same][0])
        costs.append(shared[same][1])
    assembled = replace(base, domains=tuple(domains), costs=tuple(costs), port_costs={})
    return RestrictedSpace(assembled, assembled.problem)


def allowed(structure: Structure, s: int, site: Site, choice: Choice, rank: int, may: Dimensions) -> bool:
    """Whether an operator may take a choice."""
    if site.kind != "operator" or rank in structure.samples or choice.name == "unused":
        return True
    if not may.reduction and any(state.kind == "S" for state in choice.states):
        return False
    heavy = site.node is not None and facts_of(site.node.kind).product
    return may.heads or not heavy or structure.weights[s] or product_with_weight(structure, s, site)
