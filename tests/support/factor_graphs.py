"""Random problems for the optimizer, and their solution by trying everything."""

import itertools

import numpy as np
from hypothesis import strategies as st

from unity.search.solver.problem import Alternatives, Cost, Edge, Point, Problem

SHAPES = ("tree", "cycle", "grid", "complete", "any")


def brute_force(problem: Problem) -> list[Point]:
    """Every point of a problem: all values, all alternatives."""
    found, split = [], len(problem.sizes)
    tables = [(scope, _allowed(cost)) for scope, cost in problem.tables]
    for values in itertools.product(*map(range, problem.sizes)):
        for taken in itertools.product(*(allowed[tuple(values[v] for v in scope)] for scope, allowed in tables)):
            numbers, times, memories = zip(*taken, strict=True)
            found.append(Point(sum(times), sum(memories), values, Alternatives(numbers[:split], numbers[split:])))
    return found


def _allowed(cost: Cost) -> dict[tuple[int, ...], list[tuple[int, float, float]]]:
    """For the values of a table's variables, the alternatives there are, with their costs."""
    found: dict[tuple[int, ...], list[tuple[int, float, float]]] = {values: [] for values in np.ndindex(*cost.sizes)}
    for (a, *values), time in np.ndenumerate(cost.time):
        if np.isfinite(time):
            found[tuple(values)].append((a, float(time), float(cost.memory[a, *values])))
    return found


def lower_left(points: list[Point]) -> list[tuple[float, float]]:
    """The costs that no other beats, by ascending time."""
    kept: list[tuple[float, float]] = []
    for time, memory in sorted({(p.time, p.memory) for p in points}):
        if not kept or memory < kept[-1][1]:
            kept.append((time, memory))
    return kept


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small problems of every shape of graph. Costs are small integers: sums are exact, and there are many ties."""
    shape = draw(st.sampled_from(SHAPES))
    count = {"grid": 6, "complete": 4}.get(shape) or draw(st.integers(1, 6))
    sizes = tuple(draw(st.integers(1, 3 if count < 5 else 2)) for _ in range(count))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    forbidden = draw(st.sampled_from((0.0, 0.1, 0.4)))
    most = draw(st.sampled_from((1, 2)))
    joined = draw(st.permutations(_joined(shape, count, rng)))
    unary = tuple(_cost(rng, (n,), forbidden / 2, most) for n in sizes)
    edges = tuple(Edge(a, b, _cost(rng, (sizes[a], sizes[b]), forbidden, 1 + i % 2 % most)) for i, (a, b) in enumerate(joined))
    return Problem(sizes, unary, edges)


def _joined(shape: str, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    match shape:
        case "tree":
            pairs = [(int(rng.integers(v)), v) for v in range(1, count)]
        case "cycle":
            pairs = [(v, (v + 1) % count) for v in range(count) if count > 1]
        case "grid":
            pairs = [(0, 1), (1, 2), (3, 4), (4, 5), (0, 3), (1, 4), (2, 5)]
        case "complete":
            pairs = list(itertools.combinations(range(count), 2))
        case _:
            pairs = [(int(a), int(b)) for a, b in rng.integers(count, size=(count, 2)) if a != b]
    return [(a, b) if rng.random() < 0.5 else (b, a) for a, b in pairs]


def _cost(rng: np.random.Generator, sizes: tuple[int, ...], forbidden: float, alternatives: int) -> Cost:
    time, memory = (rng.integers(0, 6, (alternatives, *sizes)).astype(float) for _ in range(2))
    time[rng.random(time.shape) < forbidden] = np.inf
    return Cost("", time, memory)


def segments(count: int, sizes: tuple[int, ...], pairs: tuple[tuple[int, int], ...], *, ring: bool = False) -> Problem:
    """Equal segments in a row: variables of these sizes, joined like `pairs`, where `len(sizes)` is the next one's first."""
    rng = np.random.default_rng(0)
    whole = (*sizes, sizes[0])
    unary = [_cost(rng, (n,), 0, 1) for n in sizes]
    inner = [(a, b, _cost(rng, (whole[a], whole[b]), 0, 1)) for a, b in pairs]
    period, last = len(sizes), count * len(sizes)
    edges = [Edge((s * period + a) % last, (s * period + b) % last, cost) for s in range(count) for a, b, cost in inner]
    if not ring:
        edges = [e for e in edges if abs(e.first - e.second) <= period]
    return Problem(sizes * count, tuple(unary) * count, tuple(edges))
