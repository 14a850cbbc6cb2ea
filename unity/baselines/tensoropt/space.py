"""TensorOpt's space of strategies (sections 2.1, 4.2) as a restriction of this project's.

The paper's assumptions, and their counterparts here:

- *Every operator has its own device mesh and tensor maps*: a configuration is one choice for each mesh axis, and different
  operators take different ones. The paper's rules for valid configurations are not published; here they are the operator table's.
- *A parameter belongs to its operator* (m_p and t_s, equation 1): a weight is stored as its operator uses it and never gathered
  for use, so FSDP is not part of the space. A weight that several operators read is re-scheduled for them, as other tensors are.
- *Redundant computation of the same tensor on different devices is allowed*: an axis may be unused.
- *Results are merged by an all-reduce after the operator*: a partial sum is never an operand. If the user needs pieces of it, the
  change of type is a reduce-scatter, which is also the shortest path of the paper's collectives.
- *Tensor re-scheduling by shortest path* is the change of type along an edge: `pcg.parallel.resharding` takes the cheapest kinds
  first, one collective a kind, and the search prices it.
- *Data loading*: arguments that are not weights arrive split by samples (their first dimension) along all axes, as far as sizes
  allow, and are re-scheduled from there.
- *Tensor reuse*: of a product's operand that is re-scheduled, both copies may be kept, or only the one before, re-scheduled again
  in the backward pass. Keeping only the one after, where the producer needs the one before too, is not expressible here.
- *No recomputation* (left for later in section 2.2): residuals and results of operators are kept.
- Repeating light operators on replicated operands, to save all-reduces of gradients, is this project's own.

Inner digits of dimensions (a fused query-key-value) are kept: TensorOpt's users would have three products.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from unity.baselines.restricted import RestrictedSpace, Structure, most_split, only, without
from unity.machine.resharding_tables import Types
from unity.pcg.propagation.choice import Choice
from unity.search.cost.cost import SiteCost, site_cost
from unity.search.solver.problem import Array, Problem
from unity.search.space.configurations import Domain, domain, domain_of_picks, shapes_of
from unity.search.space.sites import Site


def space(structure: Structure) -> RestrictedSpace:
    """Return the variables of a search with TensorOpt's values."""
    base = structure.search.assembled
    domains, costs = dict[int, Domain](), dict[int, SiteCost]()
    shared: dict[tuple, tuple[Domain, SiteCost]] = {}
    order = sorted(range(len(base.domains)), key=lambda s: base.opened.sites[s].weight)  # weights follow their operators
    for s in order:
        site = base.opened.sites[s]
        readers = structure.users[s] if site.weight else ()
        same = (id(base.domains[s]), *((domains[u].key, p) for u, p in readers))
        if same not in shared:
            domain_ = weights(structure, s, [(domains[u], p) for u, p in readers]) if readers else values(structure, s)
            cost = replace(site_cost(site, domain_, base.machine, base.training), saved=None)
            shared[same] = domain_, cost
        domains[s], costs[s] = shared[same]
    sites = range(len(base.domains))
    assembled = replace(
        base, domains=tuple(domains[s] for s in sites), costs=tuple(costs[s] for s in sites), port_costs={}, rerun=False
    )
    return RestrictedSpace(assembled, as_used(structure, assembled.domains, assembled.problem))


def values(structure: Structure, s: int) -> Domain:
    """Return the configurations of an operator, of a copy that several share, or of data."""
    base, site = structure.search.assembled, structure.search.assembled.opened.sites[s]
    choices, rank = structure.choices[s], structure.rank[s]
    if site.kind == "input" and not site.weight:
        return domain_of_picks(choices, loaded(structure, s, site), shapes_of(site), base.machine.axes)
    allowed = [i for i, c in enumerate(choices) if configurable(site, c)]
    return domain(site, tuple(choices[i] for i in allowed), tuple(rank[i] for i in allowed), base.machine.axes)


def loaded(structure: Structure, s: int, site: Site) -> Array:
    """Return how data is loaded: split by samples along as many axes as sizes allow; one value, [1, axes]."""
    choices = structure.choices[s]
    samples = [i for i, c in enumerate(choices) if c.results[0].kind == "P" and c.results[0].dim == 0]
    return most_split(choices, samples, site, structure.search.machine.axes)


def configurable(site: Site, choice: Choice) -> bool:
    """Return whether TensorOpt's operators have this choice."""
    return site.kind != "operator" or not (choice.name == "replicated" or any(s.kind == "S" for s in choice.operands))


def weights(structure: Structure, s: int, readers: list[tuple[Domain, int]]) -> Domain:
    """Return the ways to store a weight: as its users read it, or, where it cannot be stored so, whole or in outer pieces."""
    base, site = structure.search.assembled, structure.search.assembled.opened.sites[s]
    choices = structure.choices[s]
    whole = next(i for i, c in enumerate(choices) if c.results[0].kind == "U")
    pieces = {c.results[0].dim: i for i, c in enumerate(choices) if c.results[0].kind == "P" and c.results[0].outer == 1}
    rows = list[Array]()
    for of, p in readers:
        types, _ = of.types[p]
        for inner in (False, True):
            codes = [pieces.get(t.dim, whole) if t.kind == "P" and (t.outer == 1 or inner) else whole for t in types.states]
            rows.append(np.array(codes, np.int16)[types.rows])
    picks = only(choices, np.unique(np.concatenate(rows), axis=0), site, base.machine.axes)
    return domain_of_picks(choices, picks, shapes_of(site), base.machine.axes)


def as_used(structure: Structure, domains: tuple[Domain, ...], problem: Problem) -> Problem:
    """Return the problem in which a weight with a single user is stored as the user reads it."""
    base, forbidden = structure.search.assembled, dict[int, Array]()
    for e, (s, p) in enumerate(base.ports):
        source = base.opened.sites[s].ports[p].source
        if base.opened.sites[source].weight and len(structure.users[source]) == 1:
            before, first = domains[source].types[0]
            after, second = domains[s].types[p]
            forbidden[e] = ~stored(before, after)[first[:, None], second]
    return without(problem, forbidden)


def stored(before: Types, after: Types) -> Array:
    """Return whether a weight that is stored with one type can be read at another without any change, [before, after]."""
    good = np.ones((len(before), len(after)), bool)
    for k in range(before.rows.shape[1]):
        table = np.array([[_same(b.kind, b.dim, a.kind, a.dim, a.outer) for a in after.states] for b in before.states], bool)
        good &= table[before.rows[:, k][:, None], after.rows[:, k]]
    return good


def _same(kind: str, dim: int, used: str, used_dim: int, outer: int) -> bool:
    if used != "P":
        return kind == "U"
    return (kind == "P" and dim == used_dim) or (kind == "U" and outer > 1)
