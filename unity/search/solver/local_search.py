"""Local search from a point of the frontier: one variable, or one alternative, changes at a time.

Elimination reaches only the convex hull of the frontier. Local search starts from vertices of the hull to find points
between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from unity.search.solver.problem import Array, Point, Problem, points, score

# The maximum number of changes from one point.
CHANGES = 400


@dataclass(frozen=True)
class Move:
    """A change of a variable's value with the alternatives at its tables, or of an alternative alone."""

    rate: float  # lower is better; negative infinity if both costs fall or one stays
    time: float
    memory: float
    value: int
    alternatives: tuple[tuple[int, int], ...]  # (table, alternative)


def improved(problem: Problem, start: Point, memory: float) -> list[Point]:
    """Return the points of at most `memory` that are reached from `start`, each faster than the one before.

    While the memory is above the limit, the change that loses the least time per byte is made; then, while there is room, the one
    that gains the most. The last point is the fastest; the list is empty if the limit is not reached.
    """
    return [point for point in (step.point() for step in search_steps(problem, start, memory)) if point.memory <= memory]


def search_steps(problem: Problem, start: Point, memory: float) -> list[SearchStep]:
    """Return all steps of the search of `improved`, including those above the limit."""
    walk = _Walk(problem, start, memory)
    return [SearchStep(problem, walk.time, walk.memory, tuple(walk.values), tuple(walk.chosen)) for _ in walk.steps()]


@dataclass(frozen=True)
class SearchStep:
    """A step of a local search. Its costs are accumulated changes, so they are right up to rounding."""

    problem: Problem
    time: float
    memory: float
    values: tuple[int, ...]
    chosen: tuple[int, ...]

    def point(self) -> Point:
        """Return the point of this step, with costs from the tables."""
        (point,) = points(self.problem, np.array([self.values]), np.array([self.chosen]), False)
        return point


class _Walk:
    """A point that changes, and for every variable its best change."""

    def __init__(self, problem: Problem, start: Point, limit: float) -> None:
        self.problem = problem
        self.limit = limit
        self.values = list(start.values)
        self.chosen = [*start.alternatives.unary, *start.alternatives.edges]
        self.at: list[list[int]] = [[] for _ in problem.sizes]
        for table, (scope, _) in enumerate(problem.tables):
            for v in scope:
                self.at[v].append(table)
        self.time, self.memory = start.time, start.memory

    def steps(self) -> Iterator[None]:
        """Change the point repeatedly, and yield after every change."""
        moves: dict[int, Move | None] = {}
        saving = self.memory > self.limit
        for _ in range(CHANGES):
            if saving and self.memory <= self.limit:
                saving = False
                moves.clear()
            for v in range(len(self.values)):
                move = moves.get(v)
                if v not in moves or (move and not saving and move.memory > self.limit - self.memory):
                    moves[v] = self._best(v, saving)
            candidates = [(best.rate, v) for v, best in moves.items() if best]
            if not candidates:
                return
            _, v = min(candidates)
            chosen = moves[v]
            assert chosen is not None
            for changed in self._make(v, chosen):
                moves.pop(changed, None)
            yield

    def _make(self, variable: int, move: Move) -> set[int]:
        """Make a move. Returns the variables whose best moves may have changed."""
        self.time += move.time
        self.memory += move.memory
        self.values[variable] = move.value
        for table, alternative in move.alternatives:
            self.chosen[table] = alternative
        return {v for table in self.at[variable] for v in self.problem.tables[table][0]} | {variable}

    def _best(self, variable: int, saving: bool) -> Move | None:
        """Return the best change of a variable, by the exchange rate of its two costs."""
        time, memory, chosen = self._costs(variable)
        current = [self._cost(table) for table in self.at[variable]]
        time = time - sum(t for t, _ in current)
        memory = memory - sum(m for _, m in current)
        finite = np.isfinite(time)
        gains, pays = (memory, time) if saving else (time, memory)
        allowed = finite & (gains < -1e-9 * abs(self.memory if saving else self.time))
        if not saving:
            allowed &= memory <= self.limit - self.memory
        if not allowed.any():
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = np.where(allowed, np.where(pays <= 0, -np.inf, pays / -gains), np.inf)
        candidates = np.flatnonzero(rate == rate.min())
        best = int(candidates[np.argmin(gains[candidates])])
        value, choice = divmod(best, len(chosen))
        alternatives = tuple((table, int(a[value])) for table, a in zip(self.at[variable], chosen[choice], strict=True))
        return Move(float(rate[best]), float(time[best]), float(memory[best]), value, alternatives)

    def _costs(self, variable: int) -> tuple[Array, Array, list[list[Array]]]:
        """Return time and memory of all values, [values, 2] flattened, with the fastest and with the leanest alternatives."""
        tables = [self._slice(table, variable) for table in self.at[variable]]
        times, memories, chosen = [], [], []
        for objective in ((1.0, 0.0), (0.0, 1.0)) if any(len(t) > 1 for t, _ in tables) else ((1.0, 0.0),):
            best = [_best_of(t, m, objective) for t, m in tables]
            pick = [_picked(t, m, b) for (t, m), b in zip(tables, best, strict=True)]
            times.append(sum(t for t, _ in pick))
            memories.append(sum(np.where(np.isfinite(t), m, 0.0) for t, m in pick))
            chosen.append(best)
        return np.stack(times, -1).ravel(), np.stack(memories, -1).ravel(), chosen

    def _slice(self, table: int, variable: int) -> tuple[Array, Array]:
        """Return a table's costs, [alternatives, values of the variable], at the current value of the other variable."""
        scope, cost = self.problem.tables[table]
        index = (slice(None), *(slice(None) if v == variable else self.values[v] for v in scope))
        return cost.time[index], cost.memory[index]

    def _cost(self, table: int) -> tuple[float, float]:
        scope, cost = self.problem.tables[table]
        entry = (self.chosen[table], *(self.values[v] for v in scope))
        return float(cost.time[entry]), float(cost.memory[entry])


def _best_of(time: Array, memory: Array, objective: tuple[float, float]) -> Array:
    """Return the best alternative at every entry of a table. Most tables have only one."""
    if len(time) == 1:
        return np.zeros(time.shape[1], np.int64)
    return np.lexsort((time, memory, score(time, memory, np.array(objective))), axis=0)[0]


def _picked(time: Array, memory: Array, best: Array) -> tuple[Array, Array]:
    if len(time) == 1:
        return time[0], memory[0]
    entries = np.arange(time.shape[1])
    return time[best, entries], memory[best, entries]
