"""Plans of a program: parallel graphs of random assignments, of what searches choose, of rewritten programs, of pipelines and branches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import unity
from unity.made import Made
from unity.pcg.capture import Captured, capture
from unity.pcg.check import check
from unity.pcg.graph import PCG
from unity.pcg.parallelize import Assignment, parallelize
from unity.plan import Plan
from unity.search.assemble import Assembled
from unity.search.cost import Training
from unity.search.problem import Alternatives, Point
from unity.search.session import Candidate, Search

MACHINES = ((1, 2), (2, 1), (1, 4), (2, 2), (1, 6), (2, 3), (3, 2), (1, 8), (2, 4), (4, 2), (1, 12), (2, 6), (1, 3), (3, 4))
OFTEN = (40, 3, 6, 6, 8, 5, 3, 4, 4, 2, 2, 2, 3, 1)
TRIES = 30


@dataclass(frozen=True)
class Trial:
    """A parallel graph to be run. `plan` makes the whole plan of it, where that is looked at, too."""

    kind: str
    machine: unity.Machine
    captured: Captured
    graph: PCG
    plan: Plan
    note: str = ""


def machine_of(rng: random.Random) -> unity.Machine:
    nodes, devices = rng.choices(MACHINES, OFTEN)[0]
    return unity.Machine.grid(nodes, devices)


def random_point(assembled: Assembled, rng: random.Random) -> Point | None:
    """Legal values of all sites, drawn one after another; None at a dead end."""
    problem = assembled.problem
    n = len(problem.sizes)
    joined: list[list[Any]] = [[] for _ in range(n)]
    for edge in problem.edges:
        joined[edge.first].append((edge.second, edge, False))
        joined[edge.second].append((edge.first, edge, True))
    possible = {id(e.cost): np.isfinite(e.cost.time).any(0) for e in problem.edges}
    allowed = [np.isfinite(cost.time).any(0) for cost in problem.unary]
    values: list[int | None] = [None] * n
    lazy = rng.random() < 0.2  # whether most things should be left alone
    for s in range(n):
        options = np.flatnonzero(allowed[s]).tolist()
        if not options:
            return None
        rng.shuffle(options)
        if lazy and rng.random() < 0.7:
            options.sort()
        for value in options:
            after, good = [], True
            for other, edge, second in joined[s]:
                table = possible[id(edge.cost)]
                column = table[:, value] if second else table[value]
                if values[other] is not None:
                    good = bool(column[values[other]])
                else:
                    left = allowed[other] & column
                    good = bool(left.any())
                    after.append((other, column))
                if not good:
                    break
            if good:
                values[s] = value
                for other, column in after:
                    allowed[other] = allowed[other] & column
                break
        if values[s] is None or not all(allowed[o].any() for o, _, _ in joined[s]):
            return None
    chosen = [v for v in values if v is not None]
    unary = [_alternative(cost.time[:, v], rng) for cost, v in zip(problem.unary, chosen, strict=True)]
    edges = [_alternative(e.cost.time[:, chosen[e.first], chosen[e.second]], rng) for e in problem.edges]
    return Point(0.0, 0.0, tuple(chosen), Alternatives(tuple(unary), tuple(edges)), False)


def _alternative(times: np.ndarray, rng: random.Random) -> int:
    options = np.flatnonzero(np.isfinite(times)).tolist()
    return options[0] if rng.random() < 0.6 else rng.choice(options)


def trial(kind: str, search: Search, made: Made, assignment: Assignment, note: str = "") -> Trial:
    """A parallel graph, held against the checker."""
    plan = Plan(made, Candidate(0.0, 0.0, assignment))
    graph = parallelize(search.graph, assignment)
    check(graph)
    return Trial(kind, search.machine, made.captured, graph, plan, note)


def argnums_of(args: Any) -> tuple[int, ...]:
    """The arguments that have a gradient."""
    return tuple(k for k, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact))


def captured_of(fn: Any, args: Any) -> Captured:
    weights = argnums_of(args)
    return capture(fn, *args, argnums=weights)


def random_trials(rng: random.Random, fn: Any, captured: Captured, machine: unity.Machine, count: int, kind: str = "random") -> Iterator[Trial]:
    """Distinct parallel graphs of random assignments."""
    search = Search(captured.graph, captured.differentiated, machine, Training(bool(captured.differentiated), 2))
    made = Made(fn, captured, search, 0.0)
    yield from assigned(rng, search, made, count, kind)


def assigned(rng: random.Random, search: Search, made: Made, count: int, kind: str) -> Iterator[Trial]:
    seen: set[str] = set()
    assembled = search.assembled
    for _ in range(TRIES + count):
        if len(seen) >= count:
            return
        point = random_point(assembled, rng)
        if point is None:
            continue
        one = trial(kind, search, made, assembled.assignment(point))
        if one.graph.key not in seen:
            seen.add(one.graph.key)
            yield one
