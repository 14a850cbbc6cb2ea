"""The choices of every site along one axis: those that its operator allows, and those that its neighbours can use.

States propagate from site to site up to a fixed point: a free site offers the states that its producer and its users have, and an
operator next to a tensor that is partitioned at an inner digit offers that digit too, if its factors allow it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from unity.pcg.propagation.choice import Choice
from unity.pcg.propagation.choices import choices_with_moves
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, partitioned
from unity.search.space.sites import Site, Slicing

DIGITS = 2  # the most inner digits that are offered for one dimension of a tensor

Offers = list[tuple[Choice, ...]]
Users = list[list[tuple[int, int, int]]]  # of each site: (user, operand position, result)


def offered(sites: Sequence[Site]) -> Offers:
    """Return the choices of every site."""
    users: Users = [[] for _ in sites]
    for u, site in enumerate(sites):
        for p, port in enumerate(site.ports):
            users[port.source].append((u, p, port.index))
    offers = [_own(site, _most_users(users[s])) for s, site in enumerate(sites)]
    queue = deque(range(len(sites)))
    waiting = set(queue)
    while queue:
        s = queue.popleft()
        waiting.discard(s)
        extended = _extended(sites, offers, users, s)
        if len(extended) > len(offers[s]):
            offers[s] = extended
            for n in {*(p.source for p in sites[s].ports), *(u for u, _, _ in users[s]), s} - waiting:
                waiting.add(n)
                queue.append(n)
    return _wanted(sites, _reachable(sites, offers), users)


def _wanted(sites: Sequence[Site], offers: Offers, users: Users) -> Offers:
    """Return the offers without partial sums of free sites that no user takes any more, such as both operands of `x @ x.T`."""

    def is_wanted(s: int, choice: Choice) -> bool:
        if sites[s].kind != "free" or sites[s].step or PARTIAL not in choice.results:
            return True
        return any(c.operands[p] == PARTIAL for u, p, _ in users[s] for c in offers[u])

    return [tuple(c for c in cs if is_wanted(s, c)) for s, cs in enumerate(offers)]


def _most_users(users: Sequence[tuple[int, int, int]]) -> int:
    """Return the number of users of a site's most used result, at least 1 and at most 2."""
    return min(max(Counter(index for _, _, index in users).values(), default=1), 2)


def _own(site: Site, users: int) -> tuple[Choice, ...]:
    if site.body is not None:
        return _without_cancelling(site, choices_with_moves(site.body, (), users))
    n = len(site.ports)
    own = [Choice("unused", (UNUSED,) * n, (UNUSED,) * len(site.results), 0, 0.0)]
    if site.kind == "input" or site.mark is not None:
        own += [_free(site, partitioned(d)) for d, size in enumerate(site.results[0].shape) if size > 1]
    return tuple(own)


def _without_cancelling(site: Site, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Return the choices that contribute nothing inside to partial sums of what it was computed from (`space.contributions`)."""
    related = {(p, q) for p, port in enumerate(site.ports) for q in port.derived}
    return tuple(c for c in choices if related.isdisjoint(c.contributions)) if related else choices


def _free(site: Site, state: State) -> Choice:
    """Return a free site's choice with this state of its first result, shifted by one dimension between a stack and its slices."""
    operands, results = shifts(site)
    moved = {n: State("P", state.dim + n, state.outer) if n and state.kind == "P" else state for n in (-1, 0, 1)}
    return Choice(str(state), tuple(moved[n] for n in operands), tuple(moved[n] for n in results), 0, 0.0)


def shifts(site: Site) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the additional dimensions of each operand and each result of a free site, relative to its first result."""
    if site.step == Slicing.CARRY:
        return (1, 0), (0, 1)
    return ({Slicing.SLICE: 1, Slicing.STACK: -1}.get(site.step, 0),) * len(site.ports), (0,)


def _extended(sites: Sequence[Site], offers: Offers, users: Users, s: int) -> tuple[Choice, ...]:
    """Return a site's choices and those that match the states of its neighbours."""
    site = sites[s]
    neighbours: dict[tuple[int, State], None] = {}
    for p, port in enumerate(site.ports):
        position = len(sites[port.source].ports) + port.index
        neighbours.update(((p, c.states[position]), None) for c in offers[port.source])
    for u, p, index in users[s]:
        neighbours.update(((len(site.ports) + index, c.operands[p]), None) for c in offers[u])
    if site.body is not None:
        seeds = _seeds(offers[s], [n for n in neighbours if n[1].kind == "P" and n[1].outer > 1])
        if not seeds:
            return offers[s]
        return _without_cancelling(site, choices_with_moves(site.body, seeds, _most_users(users[s])))
    present = {c.states for c in offers[s]}
    extended = list(offers[s])
    may_be_partial = _may_be_partial(sites, offers, users, s)
    for position, state in neighbours:
        result = _of_result(site, state, position, may_be_partial)
        if result is not None:
            choice = _free(site, result)
            if choice.states not in present:
                present.add(choice.states)
                extended.append(choice)
    return tuple(extended)


def _may_be_partial(sites: Sequence[Site], offers: Offers, users: Users, s: int) -> bool:
    """Return whether a free site may be a partial sum.

    Its producer must offer one, and all users that run no less often than the site must accept one. A loop then reduces its carry
    or its stack once, after the loop, and not in every step.
    """
    site = sites[s]
    produced = any(c.results[p.index] == PARTIAL for p in site.ports[-1:] for c in offers[p.source])
    frequent = ((u, p) for u, p, _ in users[s] if sites[u].ports[p].times >= site.times)
    return produced and not site.whole and all(any(c.operands[p] == PARTIAL for c in offers[u]) for u, p in frequent)


def _of_result(site: Site, state: State, position: int, may_be_partial: bool) -> State | None:
    """Return the state of a free site's first result for a state at one of its operands or results.

    It is None if the site cannot have it. `may_be_partial` tells whether it may be a partial sum.
    """
    if state.kind == "P":
        operands, results = shifts(site)
        state = State("P", state.dim - (operands + results)[position], state.outer)
    if state == REPLICATED and not any(site.flows):  # without a gradient, replicated for use means nothing
        return None
    if (state == PARTIAL and not may_be_partial) or (site.whole and (state == REPLICATED or state.outer > 1)):
        return None
    stacked = state.kind == "P" and (state.dim < 0 or (site.step == Slicing.STACK and state.dim == 0))
    return None if stacked else state  # the dimension that a scan iterates over is not partitioned


def _seeds(present: tuple[Choice, ...], requested: list[tuple[int, State]]) -> tuple[tuple[int, State], ...]:
    """Return at most `DIGITS` inner digits for each dimension of each operand and result, those already present first."""
    chosen = {(p, s) for c in present for p, s in enumerate(c.states) if s.kind == "P" and s.outer > 1}
    count: dict[tuple[int, int], int] = {}
    for position, state in chosen:
        count[position, state.dim] = count.get((position, state.dim), 0) + 1
    for position, state in requested:
        if (position, state) not in chosen and count.get((position, state.dim), 0) < DIGITS:
            chosen.add((position, state))
            count[position, state.dim] = count.get((position, state.dim), 0) + 1
    return tuple(sorted(chosen))


def _reachable(sites: Sequence[Site], offers: Offers) -> Offers:
    """Return the offers without partial sums that no site produces, and without replication that has no effect."""
    of_weights = _of_weights(sites)
    candidates = [
        tuple(c for c in cs if _is_useful(site, c, s in of_weights)) for s, (site, cs) in enumerate(zip(sites, offers, strict=True))
    ]
    produced, partial = (
        _partial_results(sites, candidates, _has_all_partials),
        _partial_results(sites, candidates, _has_some_partial),
    )
    return [
        tuple(c for c in cs if (_has_all_partials(site, c, produced) if site.is_product else _has_some_partial(site, c, partial)))
        for site, cs in zip(sites, candidates, strict=True)
    ]


Results = set[tuple[int, int]]  # of sites


def _partial_results(sites: Sequence[Site], offers: Offers, rule: Callable[[Site, Choice, Results], bool]) -> Results:
    """Return the results that may be partial sums: the least fixed point of a rule that allows choices given such results."""
    partial: Results = set()
    before = -1
    while len(partial) > before:
        before = len(partial)
        for s, (site, cs) in enumerate(zip(sites, offers, strict=True)):
            for c in (*cs, *([site.staged] if site.staged is not None else [])):
                if rule(site, c, partial):
                    partial.update((s, k) for k, state in enumerate(c.results) if state == PARTIAL)
    return partial


def _partial_operands(site: Site, choice: Choice) -> list[tuple[int, int]]:
    return [(p.source, p.index) for s, p in zip(choice.operands, site.ports, strict=True) if s == PARTIAL]


def _has_all_partials(site: Site, choice: Choice, partial: Results) -> bool:
    """Return whether sites produce all partial sums that a choice takes, so that no heavy work is repeated."""
    return partial.issuperset(_partial_operands(site, choice))


def _has_some_partial(site: Site, choice: Choice, partial: Results) -> bool:
    """Return whether sites produce at least one of the partial sums that a choice takes, if it takes any.

    The others become partial sums for free. A choice that also takes partitioned operands passes, as it adds the partial sums to
    its own contributions.
    """
    partials = _partial_operands(site, choice)
    return not partials or not partial.isdisjoint(partials) or any(s.kind == "P" for s in choice.operands)


def _of_weights(sites: Sequence[Site]) -> set[int]:
    """Return the sites that depend on weights, and on nothing else."""
    dependent: set[int] = set()
    for s, site in enumerate(sites):
        if site.weight or (site.ports and all(port.source in dependent for port in site.ports)):
            dependent.add(s)
    return dependent


def _is_useful(site: Site, choice: Choice, of_weights: bool) -> bool:
    """Return whether a choice can pay off at a site.

    Repeating an operator on replicated operands pays off only if a gradient is reduced earlier for it. A product pays off if it is
    of weights alone, whose gradients are reduced together at the end of the step. A halo needs all devices (`pcg.parallel.check`),
    and those of stages or branches do not run together.
    """
    if choice.halos and site.along:
        return False
    if choice.name != "replicated" or not site.ports or site.node is None:
        return True
    return (of_weights or not site.is_product) and any(p.gradient for p in site.ports)
