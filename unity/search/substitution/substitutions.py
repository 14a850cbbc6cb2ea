"""The substitutions, and what a graph is turned into by one.

- An operator is *parallelized* to some degree, over one axis or several: op(xs) = combine(op(partition(xs))), or
  = reduce(op(partition(xs))), or a partial sum or a replica moves through it. These are the choices of the operator table, which
  are proved (`unity rules verify --operators`), and nothing else. They are taken backward, too, and one in place of another.
- A value is *placed*: an argument is stored in parts, its users change it once for all, a result leaves in parts.

As in Unity's own code, graphs are simplified after every step, at no cost: what all users of a value ask for is done once, where it
is stored or copied; what a partition undoes of a combine is left out; neighbours on an edge are fused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unity.pcg.types.parallel_type import State
from unity.search.substitution.space import Axes, Graph, Space


@dataclass(frozen=True)
class Step:
    """A substitution: a site makes another choice along some axes. `placed`: the places that follow it, with theirs."""

    site: int
    choice: int
    axes: Axes
    placed: tuple[tuple[int, int], ...] = ()

    @property
    def choices(self) -> tuple[tuple[int, int], ...]:
        """Every site that it changes, and to which choice."""
        return ((self.site, self.choice), *self.placed)


def applied(space: Space, graph: Graph, step: Step) -> dict[int, int]:
    """The values that sites have after a step; nothing if a tensor cannot be divided so."""
    found = {s: space.turned(space.kinds[s], graph[s], step.axes)[c] for s, c in step.choices}
    return {} if -1 in found.values() else found


def after(space: Space, graph: Graph, step: Step) -> Graph:
    """The graph that a step leads to."""
    values = list(graph)
    for s, v in applied(space, graph, step).items():
        values[s] = v
    return tuple(values)


def steps(space: Space, graph: Graph, part: Sequence[int], degrees: Sequence[Axes]) -> Iterator[tuple[Step, dict[int, int]]]:
    """Every substitution of some sites of a graph, of some degrees, and the values that change."""
    inside = frozenset(part)
    for s in part:
        for axes in degrees:
            kind, now = space.kinds[s], choice_on(space, graph, s, axes)
            for choice, value in enumerate(space.turned(kind, graph[s], axes) if now is not None else ()):
                if choice != now and value >= 0:
                    step = Step(s, choice, axes, tuple(following(space, graph, s, choice, axes, inside)))
                    changed = applied(space, graph, step)
                    if changed:
                        yield step, changed


def choice_on(space: Space, graph: Graph, s: int, axes: Axes) -> int | None:
    """The choice that a site makes along some axes; nothing if it makes several."""
    pick = space.kinds[s].values[graph[s]]
    first = pick[axes[0]]
    return first if all(pick[a] == first for a in axes) else None


def following(space: Space, graph: Graph, s: int, choice: int, axes: Axes, inside: frozenset[int]) -> Iterator[tuple[int, int]]:
    """The places that follow a site, and their choices.

    A place follows where all its users ask for the same; a result follows what makes it.
    """
    chosen: dict[int, int | None] = {s: choice}

    def state(site: int, end: int) -> State | None:
        c = chosen[site] if site in chosen else choice_on(space, graph, site, axes)
        return None if c is None else space.kinds[site].choices[c].states[end]

    def turn(n: int, end: int, wanted: State | None) -> Iterator[tuple[int, int]]:
        kind = space.kinds[n]
        if n in chosen or n not in inside or space.sites[n].kind == "operator" or wanted is None:
            return
        found = next((c for c, x in enumerate(kind.choices) if x.states[end] == wanted), None)
        if found not in (None, choice_on(space, graph, n, axes)) and choice_on(space, graph, n, axes) is not None:
            chosen[n] = found
            yield n, found
            yield from sources(n)

    def sources(n: int) -> Iterator[tuple[int, int]]:
        for source, position, _ in space.edges[n]:
            asked = {state(u, p) for u, p in space.users[source] if space.edges[u][p][1] == position}
            if len(asked) == 1:
                yield from turn(source, position, *asked)

    yield from sources(s)
    for u, p in space.users[s]:
        if not space.users[u]:
            yield from turn(u, p, state(s, space.edges[u][p][1]))
