"""The choices of every site along one axis: what its operator allows, and what its neighbours could use.

States spread from site to site until nothing is new: a free site offers what its producer makes and its users want, and an
operator next to a tensor that is partitioned at an inner digit offers that digit too, if its factors allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from unity.pcg.propagation.choices import Choice, choices
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, partitioned
from unity.search.space.sites import Site

DIGITS = 2  # inner digits offered for one dimension of a tensor

Offers = list[tuple[Choice, ...]]
Users = list[list[tuple[int, int, int]]]  # of each site: (user, operand position, result)


def offered(sites: Sequence[Site]) -> Offers:
    """The choices of every site."""
    found = [_own(site) for site in sites]
    users: Users = [[] for _ in sites]
    for u, site in enumerate(sites):
        for p, port in enumerate(site.ports):
            users[port.source].append((u, p, port.index))
    queue = deque(range(len(sites)))
    waiting = set(queue)
    while queue:
        s = queue.popleft()
        waiting.discard(s)
        grown = _grown(sites, found, users, s)
        if len(grown) > len(found[s]):
            found[s] = grown
            for n in {*(p.source for p in sites[s].ports), *(u for u, _, _ in users[s]), s} - waiting:
                waiting.add(n)
                queue.append(n)
    return _reachable(sites, found)


def _own(site: Site) -> tuple[Choice, ...]:
    if site.node is not None and site.node.body is not None:
        return choices(site.node.body)
    n = len(site.ports)
    found = [Choice("unused", (UNUSED,) * n, (UNUSED,) * len(site.results), 0, 0.0)]
    if site.kind == "input" or site.mark is not None:
        found += [_free(site, partitioned(d)) for d, size in enumerate(site.results[0].shape) if size > 1]
    return tuple(found)


def _free(site: Site, state: State) -> Choice:
    """A free site's choice with this state of its first result; a step of a scan has one dimension less than what is stacked."""
    operands, results = shifts(site)
    moved = {n: State("P", state.dim + n, state.outer) if n and state.kind == "P" else state for n in (-1, 0, 1)}
    return Choice(str(state), tuple(moved[n] for n in operands), tuple(moved[n] for n in results), 0, 0.0)


def shifts(site: Site) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How many more dimensions each operand and each result of a free site has than its first result."""
    if site.step == "through":
        return (1, 0), (0, 1)
    return ({"in": 1, "out": -1}.get(site.step, 0),) * len(site.ports), (0,)


def _grown(sites: Sequence[Site], found: Offers, users: Users, s: int) -> tuple[Choice, ...]:
    """A site's choices, with those added that take or give the states that its neighbours speak of."""
    site = sites[s]
    wanted: dict[tuple[int, State], None] = {}
    for p, port in enumerate(site.ports):
        position = len(sites[port.source].ports) + port.index
        wanted.update(((p, c.states[position]), None) for c in found[port.source])
    for u, p, index in users[s]:
        wanted.update(((len(site.ports) + index, c.operands[p]), None) for c in found[u])
    if site.node is not None and site.node.body is not None:
        seeds = _few(found[s], [w for w in wanted if w[1].kind == "P" and w[1].outer > 1])
        return choices(site.node.body, seeds) if seeds else found[s]
    present = {c.states for c in found[s]}
    grown = list(found[s])
    summed = _summed(sites, found, users, s)
    for position, state in wanted:
        result = _of_result(site, state, position, summed)
        if result is not None:
            choice = _free(site, result)
            if choice.states not in present:
                present.add(choice.states)
                grown.append(choice)
    return tuple(grown)


def _summed(sites: Sequence[Site], found: Offers, users: Users, s: int) -> bool:
    """Whether a free site may be a partial sum: it is made as one, and all that read it as often as it is made take it so. A loop
    then reduces what it carries, or stacks, once and after it, not in every step."""
    site = sites[s]
    made = any(c.results[p.index] == PARTIAL for p in site.ports[-1:] for c in found[p.source])
    often = ((u, p) for u, p, _ in users[s] if sites[u].ports[p].times >= site.times)
    return made and not site.whole and all(any(c.operands[p] == PARTIAL for c in found[u]) for u, p in often)


def _of_result(site: Site, state: State, position: int, summed: bool) -> State | None:
    """A neighbour's state at an operand or a result as one of a free site's first result. None: the site cannot have it.

    `summed`: whether it may be a partial sum.
    """
    if state.kind == "P":
        operands, results = shifts(site)
        state = State("P", state.dim - (operands + results)[position], state.outer)
    if state == REPLICATED and not any(site.flows):  # of what has no gradient it is no more than unused
        return None
    if (state == PARTIAL and not summed) or (site.whole and (state == REPLICATED or state.outer > 1)):
        return None
    stacked = state.kind == "P" and (state.dim < 0 or (site.step == "out" and state.dim == 0))
    return None if stacked else state  # the steps of a scan are not partitioned


def _few(present: tuple[Choice, ...], wanted: list[tuple[int, State]]) -> tuple[tuple[int, State], ...]:
    """At most `DIGITS` inner digits for each dimension of each operand and result."""
    chosen = {(p, s) for c in present for p, s in enumerate(c.states) if s.kind == "P" and s.outer > 1}
    count: dict[tuple[int, int], int] = {}
    for position, state in chosen:
        count[position, state.dim] = count.get((position, state.dim), 0) + 1
    for position, state in wanted:
        if (position, state) not in chosen and count.get((position, state.dim), 0) < DIGITS:
            chosen.add((position, state))
            count[position, state.dim] = count.get((position, state.dim), 0) + 1
    return tuple(sorted(chosen))


def _reachable(sites: Sequence[Site], found: Offers) -> Offers:
    """Drops choices of which no operand is a partial sum before it is made one, and replication where it means nothing."""
    kept = [tuple(c for c in cs if _sensible(site, c)) for site, cs in zip(sites, found, strict=True)]
    made, partial = _partial(sites, kept, _all_made), _partial(sites, kept, _fed)
    return [
        tuple(c for c in cs if (_all_made(site, c, made) if _heavy(site) else _fed(site, c, partial)))
        for site, cs in zip(sites, kept, strict=True)
    ]


Results = set[tuple[int, int]]  # of sites


def _partial(sites: Sequence[Site], found: Offers, rule: Callable[[Site, Choice, Results], bool]) -> Results:
    """The results that may be partial sums, if a rule says which choices may be, given those."""
    partial: Results = set()
    before = -1
    while len(partial) > before:
        before = len(partial)
        for s, (site, cs) in enumerate(zip(sites, found, strict=True)):
            for c in (*cs, *([site.staged] if site.staged is not None else [])):
                if rule(site, c, partial):
                    partial.update((s, k) for k, state in enumerate(c.results) if state == PARTIAL)
    return partial


def _taken(site: Site, choice: Choice) -> list[tuple[int, int]]:
    return [(p.source, p.index) for s, p in zip(choice.operands, site.ports, strict=True) if s == PARTIAL]


def _all_made(site: Site, choice: Choice, partial: Results) -> bool:
    """Whether all partial sums that a choice takes are made as such. Heavy work is not repeated for what was contributed."""
    return partial.issuperset(_taken(site, choice))


def _fed(site: Site, choice: Choice, partial: Results) -> bool:
    """Whether one of the partial sums that a choice takes, if it takes any, is made as one, or they are added to what is summed
    here over what is partitioned. Others become such for free."""
    taken = _taken(site, choice)
    return not taken or not partial.isdisjoint(taken) or any(s.kind == "P" for s in choice.operands)


def _heavy(site: Site) -> bool:
    return site.node is not None and facts_of(site.node.kind).product


def _sensible(site: Site, choice: Choice) -> bool:
    """Whether a choice may be worth it, where the site is.

    To repeat an operator on replicated operands pays only if it is light and a gradient is reduced the earlier for it. A halo needs
    all devices (`pcg.check`), which do not run what is inside of stages or branches together.
    """
    if choice.halos and site.along:
        return False
    if choice.name != "replicated" or not site.ports or site.node is None:
        return True
    return not _heavy(site) and any(p.gradient for p in site.ports)
