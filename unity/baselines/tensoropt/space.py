"""TensorOpt's space of strategies (sections 2.1, 4.2) as a restriction of this project's.

What the paper says, and what it is here:

- *Every operator has a device mesh and tensor maps of its own*: a configuration is one choice for each mesh axis, and different
  operators take different ones. The paper's rules for valid configurations are not published; here they are the operator table's.
- *A parameter belongs to its operator* (m_p and t_s, equation 1): a weight is stored as its operator uses it, so it is never
  gathered for use, and there is no FSDP. A weight that several operators read is re-scheduled for them, as other tensors are.
- *Redundant computation of the same tensor on different devices is allowed*: an axis may be unused.
- *Results are merged by an all-reduce after the operator*: a partial sum is never an operand. Where what follows wants pieces of
  it, the change of type is a reduce-scatter, which the shortest path of the paper's collectives is too.
- *Tensor re-scheduling by shortest path* is the change of type along an edge: `pcg.resharding` takes the cheapest kinds first, one
  collective a kind, and `search.reshard` prices it.
- *Data loading*: arguments that are no weights arrive split by samples (their first dimension) along all axes, as far as that goes,
  and are re-scheduled from there.
- *Tensor reuse*: of a product's operand that is re-scheduled, both copies may be kept, or only the one before, re-scheduled
  again in the backward pass. To keep only the one after, where the producer needs the one before too, is not expressible here.
- *No recomputation* (section 2.2 leaves it for later): inner values and results of operators are kept.
- The light repetition of operators on replicated operands, for the sake of fewer reduces of gradients, is this project's own.

Inner digits of dimensions (a fused query-key-value) are kept: TensorOpt's users would have three products.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from unity.baselines.restricted import Space, Structure, most_split, only, without
from unity.machine.resharding_tables import Types
from unity.pcg.propagation.choices import Choice
from unity.search.cost.cost import SiteCost, site_cost
from unity.search.solver.problem import Array, Problem
from unity.search.space.configurations import Domain, domain, made, shapes_of
from unity.search.space.sites import Site


def space(structure: Structure) -> Space:
    """The variables of a search with the values that TensorOpt has."""
    base = structure.search.assembled
    domains, costs = dict[int, Domain](), dict[int, SiteCost]()
    shared: dict[tuple, tuple[Domain, SiteCost]] = {}
    order = sorted(range(len(base.domains)), key=lambda s: base.opened.sites[s].weight)  # weights follow their operators
    for s in order:
        site = base.opened.sites[s]
        readers = structure.readers[s] if site.weight else ()
        same = (id(base.domains[s]), *((domains[u].key, p) for u, p in readers))
        if same not in shared:
            found = weights(structure, s, [(domains[u], p) for u, p in readers]) if readers else values(structure, s)
            cost = replace(site_cost(site, found, base.machine, base.training), saved=None)
            shared[same] = found, cost
        domains[s], costs[s] = shared[same]
    sites = range(len(base.domains))
    assembled = replace(base, domains=tuple(domains[s] for s in sites), costs=tuple(costs[s] for s in sites), known={}, rerun=False)
    return Space(assembled, as_used(structure, assembled.domains, assembled.problem))


def values(structure: Structure, s: int) -> Domain:
    """The configurations of an operator, of a copy that several share, or of data."""
    base, site = structure.search.assembled, structure.search.assembled.opened.sites[s]
    found, rank = structure.found[s], structure.rank[s]
    if site.kind == "input" and not site.weight:
        return made(found, loaded(structure, s, site), shapes_of(site), base.machine.axes)
    kept = [i for i, c in enumerate(found) if configurable(site, c)]
    return domain(site, tuple(found[i] for i in kept), tuple(rank[i] for i in kept), base.machine.axes)


def loaded(structure: Structure, s: int, site: Site) -> Array:
    """How data is loaded: split by samples along as many axes as sizes allow; one value, [1, axes]."""
    found = structure.found[s]
    samples = [i for i, c in enumerate(found) if c.results[0].kind == "P" and c.results[0].dim == 0]
    return most_split(found, samples, site, structure.search.machine.axes)


def configurable(site: Site, choice: Choice) -> bool:
    """Whether TensorOpt's operators have this choice."""
    return site.kind != "operator" or not (choice.name == "replicated" or any(s.kind == "S" for s in choice.operands))


def weights(structure: Structure, s: int, readers: list[tuple[Domain, int]]) -> Domain:
    """The ways to store a weight: as those who read it use it, and where it cannot be stored so, whole or in outer pieces."""
    base, site = structure.search.assembled, structure.search.assembled.opened.sites[s]
    found = structure.found[s]
    whole = next(i for i, c in enumerate(found) if c.results[0].kind == "U")
    pieces = {c.results[0].dim: i for i, c in enumerate(found) if c.results[0].kind == "P" and c.results[0].outer == 1}
    rows = list[Array]()
    for of, p in readers:
        types, _ = of.types[p]
        for inner in (False, True):
            codes = [pieces.get(t.dim, whole) if t.kind == "P" and (t.outer == 1 or inner) else whole for t in types.states]
            rows.append(np.array(codes, np.int16)[types.rows])
    picks = only(found, np.unique(np.concatenate(rows), axis=0), site, base.machine.axes)
    return made(found, picks, shapes_of(site), base.machine.axes)


def as_used(structure: Structure, domains: tuple[Domain, ...], problem: Problem) -> Problem:
    """The problem where a weight that one operator reads is stored as that uses it."""
    base, forbidden = structure.search.assembled, dict[int, Array]()
    for e, (s, p) in enumerate(base.ports):
        source = base.opened.sites[s].ports[p].source
        if base.opened.sites[source].weight and len(structure.readers[source]) == 1:
            before, first = domains[source].types[0]
            after, second = domains[s].types[p]
            forbidden[e] = ~stored(before, after)[first[:, None], second]
    return without(problem, forbidden)


def stored(before: Types, after: Types) -> Array:
    """Whether a weight of one type is what an operator that uses it as another has at once, [before, after]."""
    good = np.ones((len(before), len(after)), bool)
    for k in range(before.rows.shape[1]):
        table = np.array([[_same(b.kind, b.dim, a.kind, a.dim, a.outer) for a in after.states] for b in before.states], bool)
        good &= table[before.rows[:, k][:, None], after.rows[:, k]]
    return good


def _same(kind: str, dim: int, used: str, used_dim: int, outer: int) -> bool:
    if used != "P":
        return kind == "U"
    return (kind == "P" and dim == used_dim) or (kind == "U" and outer > 1)
