"""Level 1: the graph in segments, each searched within its share of the budget, and equal ones once (Unity, section 5.3).

Unity searches what is before and after a tensor under every type of it. Here a search starts from graphs where all tensors between
segments have one type, each in turn, and keep it while what is between them is searched; then they are free. (Without that, large
machines are out of reach: an operator alone never pays for the collectives around it.) The narrowest segments are single operators:
there every tensor has the type. Segments take turns, forward and back again, each with its neighbours as they are by then, until
nothing is gained. When all starts were tried, with steps of their own degree, the best goes on with steps of any; and all of it is
done again with larger shares. What comes when depends on nothing but the graph, so a larger budget goes on where a smaller one
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
from unity.search.substitution.space import Axes, Graph, Space
from unity.search.substitution.substitutions import Step, after, applied

LEAST = 10  # operators in a segment (Unity, section 5.3)
SHARE, DEEPER = 8, 4  # graphs of a segment that are rewritten in a round, and how many times more when all is looked at again

DIMENSIONS = (0, 1)  # of tensors, that are partitioned where a search starts

Part = tuple[int, ...]  # sites


@dataclass(frozen=True)
class Reached:
    """A graph, what it costs, and all steps that lead to it from the serial one."""

    graph: Graph
    price: float
    steps: tuple[Step, ...] = ()
    candidates: int = 0  # that were priced until then


def improvements(space: Space, budget: Budget, say: Callable[[str], None] = lambda stage: None) -> Iterator[Reached]:
    """Parallel graphs, each cheaper than all before it; the first is the serial one."""
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
                given = {step.site for step in start.steps}
                free = tuple(tuple(s for s in part if s not in given) for part in every)
                *_, found = (start, *rounds(space, start, free, (degree,), share, spent))
                *_, found = (found, *rounds(space, found, every, (degree,), share, spent))
                if found.price < best.price:
                    best = found
                    yield best
        for better in rounds(space, best, every, space.degrees, share, spent):
            best = better
            yield best
        if not (spent.cut and spent.left):
            return


def rounds(
    space: Space, best: Reached, every: Sequence[Part], degrees: Sequence[Axes], share: int, spent: Spent
) -> Iterator[Reached]:
    """Takes segments in turns, forward and back again, as long as that gains anything: cheaper and cheaper graphs."""
    known: dict[tuple, tuple[Step, ...]] = {}
    idle, turn = 0, itertools.cycle((every, every[::-1]))
    while idle < 2 and spent.left:
        before = best
        for part in next(turn):
            key = surroundings(space, best.graph, part)
            if key not in known:
                found = backtrack(space, best.graph, part, degrees, share, spent)
                number = {s: i for i, s in enumerate(part)}
                known[key] = tuple(_renamed(step, number.__getitem__) for step in found.steps)
            steps = tuple(_renamed(step, part.__getitem__) for step in known[key])
            if steps:
                best = _taken(space, best, steps, spent.candidates)
                yield best
            if not spent.left:
                return
        idle = idle + 1 if before is best else 0


def starts(space: Space, every: Sequence[Part], axes: Axes, spent: Spent) -> Iterator[Reached]:
    """Graphs where samples and all tensors between two segments, or all tensors, are partitioned in one way; the serial one."""
    serial = Reached(space.serial, space.price(space.serial))
    of = {s: k for k, part in enumerate(every) for s in part}
    given = [s for s, site in enumerate(space.sites) if site.kind == "input" and not site.weight]
    reached = set(given)
    for s, edges in enumerate(space.edges):
        reached.update({s} if any(source in reached for source, *_ in edges) else ())
    operators = [s for s in sorted(reached) if space.sites[s].kind != "input"]
    crossing = [s for s in operators if any(of[u] != of[s] for u, _ in space.users[s])]
    for dim, chosen in itertools.product(DIMENSIONS, (crossing, operators)):
        now = serial
        for s in (*given, *chosen):
            step = _partitioning(space, now.graph, s, dim, axes)
            if step is not None:
                now = Reached(after(space, now.graph, step), 0.0, (*now.steps, step))
        if now.steps:
            spent.candidates += 1
            yield replace(now, price=space.price(now.graph), candidates=spent.candidates)
    yield replace(serial, candidates=spent.candidates)


def _partitioning(space: Space, graph: Graph, s: int, dim: int, axes: Axes) -> Step | None:
    """The step that partitions a site's results in a dimension; nothing if there is none."""
    kind = space.kinds[s]
    for choice, value in enumerate(space.turned(kind, graph[s], axes)):
        if value >= 0 and all(r == partitioned(dim) for r in kind.choices[choice].results):
            step = Step(s, choice, axes)
            return step if space.difference(graph, applied(space, graph, step)) < math.inf else None
    return None


def _taken(space: Space, start: Reached, steps: tuple[Step, ...], candidates: int) -> Reached:
    graph = start.graph
    for step in steps:
        graph = after(space, graph, step)
    return Reached(graph, space.price(graph), (*start.steps, *steps), candidates)


def _renamed(step: Step, name: Callable[[int], int]) -> Step:
    return replace(step, site=name(step.site), placed=tuple((name(s), c) for s, c in step.placed))


def parts(space: Space, least: int = LEAST) -> tuple[Part, ...]:
    """The segments: operators in order, cut where little crosses, each with the arguments that it is the first to use."""
    row = [s for s, site in enumerate(space.sites) if site.kind != "input"]
    place = {s: k for k, s in enumerate(row)}
    last = {s: max((place[u] for u, _ in space.users[s]), default=-1) for s in row}
    crossing = [sum(place[s] < p <= last[s] for s in row) for p in range(len(row) + 1)]
    signatures = [str(id(space.kinds[s])) for s in row]
    ends = [0, *places(crossing, signatures, least), len(row)]
    found, taken = [], set[int]()
    for start, end in itertools.pairwise(ends):
        own = row[start:end]
        given = [source for s in own for source, *_ in space.edges[s] if source not in place]
        found.append((*own, *(s for s in dict.fromkeys(given) if s not in taken)))
        taken.update(given)
    return tuple(part for part in found if part)


def surroundings(space: Space, graph: Graph, part: Sequence[int]) -> tuple:
    """All that the search of a segment depends on: equal for segments that are the same problem."""
    number = {s: i for i, s in enumerate(part)}
    found = []
    for s in part:
        given = []
        for source, position, edge in space.edges[s]:
            made = space.kinds[source].ends[graph[source]][position]
            given.append((edge, number.get(source, -1), position, made))
        used = []
        for u, p in space.users[s]:
            _, position, edge = space.edges[u][p]
            used.append((edge, number.get(u, -1), position, space.kinds[u].ends[graph[u]][p]))
        found.append((id(space.kinds[s]), graph[s], tuple(given), tuple(used)))
    free = tuple(bool(h) for h in hashes(space, graph))
    return (free, *found)
