"""Level 1: the graph in segments, each searched with its share of the budget, and equal ones once (Unity, section 5.3).

Unity searches the parts before and after a tensor under every type of it. Here a search starts from graphs where all tensors
between segments have one type, each type in turn, which they keep while the inside of the segments is searched; then they are free.
(Without that, large machines are out of reach: a single operator never pays for the collectives around it.) The narrowest segments
are single operators; then every tensor has the type. Segments take turns, forward and back again, each with its neighbours in their
current state, until nothing is gained. After all starts, with steps of their own degree, the best goes on with steps of any degree;
and everything is repeated with larger shares. The order depends only on the graph, so a larger budget continues where a smaller one
ended.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from unity.pcg.types.parallel_type import partitioned
from unity.search.joint.joint import Budget
from unity.search.joint.segments import places
from unity.search.substitution.backtracking import Spent, backtrack, hashes, usable
from unity.search.substitution.space import Axes, Graph, GraphSpace
from unity.search.substitution.substitutions import SubstitutionStep, after, applied

LEAST = 10  # minimum of operators in a segment (Unity, section 5.3)
SHARE, DEEPER = 8, 4  # graphs of a segment rewritten in a round, and the factor by which that grows when everything is repeated

DIMENSIONS = (0, 1)  # dimensions of tensors that a start may partition

Part = tuple[int, ...]  # sites


@dataclass(frozen=True)
class Reached:
    """A graph, its price, and all steps that lead to it from the serial one."""

    graph: Graph
    price: float
    steps: tuple[SubstitutionStep, ...] = ()
    candidates: int = 0  # graphs priced until then


def improvements(space: GraphSpace, budget: Budget, say: Callable[[str], None] = lambda stage: None) -> Iterator[Reached]:
    """Yield parallel graphs, each cheaper than all before it; the first is the serial one."""
    best = Reached(space.serial, space.price(space.serial))
    yield best
    every, spent = parts(space), Spent(budget)
    first = usable(space, space.degrees, hashes(space, space.serial))
    for share in (SHARE * DEEPER**k for k in itertools.count()):
        spent.cut = False
        for degree in first:
            for start in starts(space, every, degree, spent):
                if not spent.left:
                    return
                say(f"best step {best.price * 1e3:.4g} ms; {spent.candidates} parallel graphs priced")
                started = {step.site for step in start.steps}
                free = tuple(tuple(s for s in part if s not in started) for part in every)
                *_, reached = (start, *rounds(space, start, free, (degree,), share, spent))
                *_, reached = (reached, *rounds(space, reached, every, (degree,), share, spent))
                if reached.price < best.price:
                    best = reached
                    yield best
        for better in rounds(space, best, every, space.degrees, share, spent):
            best = better
            yield best
        if not (spent.cut and spent.left):
            return


def rounds(
    space: GraphSpace, best: Reached, every: Sequence[Part], degrees: Sequence[Axes], share: int, spent: Spent
) -> Iterator[Reached]:
    """Search segments in turns, forward and back again, as long as anything is gained. Yields ever cheaper graphs."""
    steps_of: dict[tuple, tuple[SubstitutionStep, ...]] = {}
    idle, turn = 0, itertools.cycle((every, every[::-1]))
    while idle < 2 and spent.left:
        before = best
        for part in next(turn):
            key = surroundings(space, best.graph, part)
            if key not in steps_of:
                result = backtrack(space, best.graph, part, degrees, share, spent)
                number = {s: i for i, s in enumerate(part)}
                steps_of[key] = tuple(_renamed(step, number.__getitem__) for step in result.steps)
            steps = tuple(_renamed(step, part.__getitem__) for step in steps_of[key])
            if steps:
                best = _reached_by(space, best, steps, spent.candidates)
                yield best
            if not spent.left:
                return
        idle = idle + 1 if before is best else 0


def starts(space: GraphSpace, every: Sequence[Part], axes: Axes, spent: Spent) -> Iterator[Reached]:
    """Yield graphs where samples and all tensors between two segments, or all tensors, are partitioned in one way; then the serial
    graph.
    """
    serial = Reached(space.serial, space.price(space.serial))
    of = {s: k for k, part in enumerate(every) for s in part}
    data = [s for s, site in enumerate(space.sites) if site.kind == "input" and not site.weight]
    dependent = set(data)
    for s, edges in enumerate(space.edges):
        dependent.update({s} if any(source in dependent for source, *_ in edges) else ())
    operators = [s for s in sorted(dependent) if space.sites[s].kind != "input"]
    crossing = [s for s in operators if any(of[u] != of[s] for u, _ in space.users[s])]
    for dim, chosen in itertools.product(DIMENSIONS, (crossing, operators)):
        now = serial
        for s in (*data, *chosen):
            step = _partitioning(space, now.graph, s, dim, axes)
            if step is not None:
                now = Reached(after(space, now.graph, step), 0.0, (*now.steps, step))
        if now.steps:
            spent.candidates += 1
            yield replace(now, price=space.price(now.graph), candidates=spent.candidates)
    yield replace(serial, candidates=spent.candidates)


def _partitioning(space: GraphSpace, graph: Graph, s: int, dim: int, axes: Axes) -> SubstitutionStep | None:
    """Return the step that partitions a site's results in a dimension; None if no choice does."""
    kind = space.kinds[s]
    for choice, value in enumerate(space.turned(kind, graph[s], axes)):
        if value >= 0 and all(r == partitioned(dim) for r in kind.choices[choice].results):
            step = SubstitutionStep(s, choice, axes)
            return step if space.difference(graph, applied(space, graph, step)) < math.inf else None
    return None


def _reached_by(space: GraphSpace, start: Reached, steps: tuple[SubstitutionStep, ...], candidates: int) -> Reached:
    graph = start.graph
    for step in steps:
        graph = after(space, graph, step)
    return Reached(graph, space.price(graph), (*start.steps, *steps), candidates)


def _renamed(step: SubstitutionStep, name: Callable[[int], int]) -> SubstitutionStep:
    return replace(step, site=name(step.site), placed=tuple((name(s), c) for s, c in step.placed))


def parts(space: GraphSpace, least: int = LEAST) -> tuple[Part, ...]:
    """Return the segments: operators in order, cut where few tensors cross, each with the arguments that it is the first to use."""
    row = [s for s, site in enumerate(space.sites) if site.kind != "input"]
    place = {s: k for k, s in enumerate(row)}
    last = {s: max((place[u] for u, _ in space.users[s]), default=-1) for s in row}
    crossing = [sum(place[s] < p <= last[s] for s in row) for p in range(len(row) + 1)]
    signatures = [str(id(space.kinds[s])) for s in row]
    ends = [0, *places(crossing, signatures, least), len(row)]
    segments, assigned = [], set[int]()
    for start, end in itertools.pairwise(ends):
        own = row[start:end]
        arguments = [source for s in own for source, *_ in space.edges[s] if source not in place]
        segments.append((*own, *(s for s in dict.fromkeys(arguments) if s not in assigned)))
        assigned.update(arguments)
    return tuple(part for part in segments if part)


def surroundings(space: GraphSpace, graph: Graph, part: Sequence[int]) -> tuple:
    """Return everything that the search of a segment depends on; equal for segments that are the same problem."""
    number = {s: i for i, s in enumerate(part)}
    sites = []
    for s in part:
        operands = []
        for source, position, edge in space.edges[s]:
            type_number = space.kinds[source].ends[graph[source]][position]
            operands.append((edge, number.get(source, -1), position, type_number))
        uses = []
        for u, p in space.users[s]:
            _, position, edge = space.edges[u][p]
            uses.append((edge, number.get(u, -1), position, space.kinds[u].ends[graph[u]][p]))
        sites.append((id(space.kinds[s]), graph[s], tuple(operands), tuple(uses)))
    free = tuple(bool(h) for h in hashes(space, graph))
    return (free, *sites)
