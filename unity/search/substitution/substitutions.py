"""The substitutions, and the graph that results from one.

- An operator is *parallelized* to some degree, over one axis or several: op(xs) = combine(op(partition(xs))), or =
  reduce(op(partition(xs))), or a partial sum or a replica moves through it. These are the choices of the operator table, which are
  proved (`unity rules verify --operators`), and nothing else. They also apply in the reverse direction, and one in place of
  another.
- A value is *placed*: an argument is stored in parts, its users change it once for all, a result leaves in parts.

As in Unity's own code, graphs are simplified after every step at no cost: a change that all users of a value need is made once,
where the value is stored or copied; a partition that undoes a combine is removed with it; neighbours on an edge are fused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unity.pcg.types.parallel_type import State
from unity.search.substitution.space import Axes, Graph, GraphSpace


@dataclass(frozen=True)
class SubstitutionStep:
    """A substitution: a site makes another choice along some axes. `placed` are the places that follow it, with their choices."""

    site: int
    choice: int
    axes: Axes
    placed: tuple[tuple[int, int], ...] = ()

    @property
    def choices(self) -> tuple[tuple[int, int], ...]:
        """Every site that changes, with its new choice."""
        return ((self.site, self.choice), *self.placed)


def applied(space: GraphSpace, graph: Graph, step: SubstitutionStep) -> dict[int, int]:
    """Return the values of sites after a step; empty if a tensor cannot be divided like this."""
    values = {s: space.turned(space.kinds[s], graph[s], step.axes)[c] for s, c in step.choices}
    return {} if -1 in values.values() else values


def after(space: GraphSpace, graph: Graph, step: SubstitutionStep) -> Graph:
    """Return the graph after a step."""
    values = list(graph)
    for s, v in applied(space, graph, step).items():
        values[s] = v
    return tuple(values)


def steps(
    space: GraphSpace, graph: Graph, part: Sequence[int], degrees: Sequence[Axes]
) -> Iterator[tuple[SubstitutionStep, dict[int, int]]]:
    """Yield every substitution of some sites of a graph, of some degrees, with the values that change."""
    inside = frozenset(part)
    for s in part:
        for axes in degrees:
            kind, now = space.kinds[s], choice_on(space, graph, s, axes)
            for choice, value in enumerate(space.turned(kind, graph[s], axes) if now is not None else ()):
                if choice != now and value >= 0:
                    step = SubstitutionStep(s, choice, axes, tuple(following(space, graph, s, choice, axes, inside)))
                    changed = applied(space, graph, step)
                    if changed:
                        yield step, changed


def choice_on(space: GraphSpace, graph: Graph, s: int, axes: Axes) -> int | None:
    """Return the choice of a site along some axes; None if it makes several."""
    pick = space.kinds[s].values[graph[s]]
    first = pick[axes[0]]
    return first if all(pick[a] == first for a in axes) else None


def following(
    space: GraphSpace, graph: Graph, s: int, choice: int, axes: Axes, inside: frozenset[int]
) -> Iterator[tuple[int, int]]:
    """Yield the places that follow a site, and their choices.

    A place follows if all its users need the same state; a result follows its producer.
    """
    chosen: dict[int, int | None] = {s: choice}

    def state(site: int, end: int) -> State | None:
        c = chosen[site] if site in chosen else choice_on(space, graph, site, axes)
        return None if c is None else space.kinds[site].choices[c].states[end]

    def turn(n: int, end: int, state_needed: State | None) -> Iterator[tuple[int, int]]:
        kind = space.kinds[n]
        if n in chosen or n not in inside or space.sites[n].kind == "operator" or state_needed is None:
            return
        follower = next((c for c, x in enumerate(kind.choices) if x.states[end] == state_needed), None)
        if follower not in (None, choice_on(space, graph, n, axes)) and choice_on(space, graph, n, axes) is not None:
            chosen[n] = follower
            yield n, follower
            yield from sources(n)

    def sources(n: int) -> Iterator[tuple[int, int]]:
        for source, position, _ in space.edges[n]:
            needed = {state(u, p) for u, p in space.users[source] if space.edges[u][p][1] == position}
            if len(needed) == 1:
                yield from turn(source, position, *needed)

    yield from sources(s)
    for u, p in space.users[s]:
        if not space.users[u]:
            yield from turn(u, p, state(s, space.edges[u][p][1]))
