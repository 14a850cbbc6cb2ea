"""From a point to better ones nearby: one variable changed at a time, or one alternative.

The objectives of elimination reach the convex hull of the frontier only. What lies between two points of the hull is
looked for from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from unity.search.solver.problem import Array, Point, Problem, points, score

# Changes that are made from one point at most.
CHANGES = 400


@dataclass(frozen=True)
class Move:
    """A change of a variable's value, with the alternatives at its tables, or of an alternative alone."""

    rate: float  # lower is better; negative infinity for what only gains
    time: float
    memory: float
    value: int
    alternatives: tuple[tuple[int, int], ...]  # (table, alternative)


def improved(problem: Problem, start: Point, memory: float) -> list[Point]:
    """Points reached from `start`, of at most `memory`, each faster than the one before.

    While the memory is above the limit, the change is made that loses the least time for a byte; then, while there is
    room, the one that gains the most. The last point is the fastest; none if the limit is not reached.
    """
    return [point for point in (step.point() for step in way(problem, start, memory)) if point.memory <= memory]


def way(problem: Problem, start: Point, memory: float) -> list[Step]:
    """All that is passed on this way, what is still above the limit included."""
    walk = _Walk(problem, start, memory)
    return [Step(problem, walk.time, walk.memory, tuple(walk.values), tuple(walk.taken)) for _ in walk.steps()]


@dataclass(frozen=True)
class Step:
    """Where a way has been; its costs are sums of changes, so they are right but for rounding."""

    problem: Problem
    time: float
    memory: float
    values: tuple[int, ...]
    taken: tuple[int, ...]

    def point(self) -> Point:
        """The same, costed from the tables."""
        (point,) = points(self.problem, np.array([self.values]), np.array([self.taken]), False)
        return point


class _Walk:
    """A point that changes, and for every variable the best change of it."""

    def __init__(self, problem: Problem, start: Point, limit: float) -> None:
        self.problem = problem
        self.limit = limit
        self.values = list(start.values)
        self.taken = [*start.alternatives.unary, *start.alternatives.edges]
        self.at: list[list[int]] = [[] for _ in problem.sizes]
        for table, (scope, _) in enumerate(problem.tables):
            for v in scope:
                self.at[v].append(table)
        self.time, self.memory = start.time, start.memory

    def steps(self) -> Iterator[None]:
        """Changes the point again and again, and stops for a moment after every change."""
        moves: dict[int, Move | None] = {}
        saving = self.memory > self.limit
        for _ in range(CHANGES):
            if saving and self.memory <= self.limit:
                saving = False
                moves.clear()
            for v in range(len(self.values)):
                known = moves.get(v)
                if v not in moves or (known and not saving and known.memory > self.limit - self.memory):
                    moves[v] = self._best(v, saving)
            found = [(move.rate, v) for v, move in moves.items() if move]
            if not found:
                return
            _, v = min(found)
            move = moves[v]
            assert move is not None
            for changed in self._make(v, move):
                moves.pop(changed, None)
            yield

    def _make(self, variable: int, move: Move) -> set[int]:
        """Makes a move, and returns the variables whose moves are others now."""
        self.time += move.time
        self.memory += move.memory
        self.values[variable] = move.value
        for table, alternative in move.alternatives:
            self.taken[table] = alternative
        return {v for table in self.at[variable] for v in self.problem.tables[table][0]} | {variable}

    def _best(self, variable: int, saving: bool) -> Move | None:
        """The best change of a variable: both costs of every value, and from them the rate of exchange."""
        time, memory, taken = self._costs(variable)
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
        value, choice = divmod(best, len(taken))
        alternatives = tuple((table, int(a[value])) for table, a in zip(self.at[variable], taken[choice], strict=True))
        return Move(float(rate[best]), float(time[best]), float(memory[best]), value, alternatives)

    def _costs(self, variable: int) -> tuple[Array, Array, list[list[Array]]]:
        """Time and memory of all values, [values, 2] flattened, with the fastest and with the leanest alternatives."""
        tables = [self._slice(table, variable) for table in self.at[variable]]
        times, memories, taken = [], [], []
        for objective in ((1.0, 0.0), (0.0, 1.0)) if any(len(t) > 1 for t, _ in tables) else ((1.0, 0.0),):
            best = [_best_of(t, m, objective) for t, m in tables]
            pick = [_picked(t, m, b) for (t, m), b in zip(tables, best, strict=True)]
            times.append(sum(t for t, _ in pick))
            memories.append(sum(np.where(np.isfinite(t), m, 0.0) for t, m in pick))
            taken.append(best)
        return np.stack(times, -1).ravel(), np.stack(memories, -1).ravel(), taken

    def _slice(self, table: int, variable: int) -> tuple[Array, Array]:
        """A table's costs, [alternatives, values of the variable], where the other variable is now."""
        scope, cost = self.problem.tables[table]
        index = (slice(None), *(slice(None) if v == variable else self.values[v] for v in scope))
        return cost.time[index], cost.memory[index]

    def _cost(self, table: int) -> tuple[float, float]:
        scope, cost = self.problem.tables[table]
        entry = (self.taken[table], *(self.values[v] for v in scope))
        return float(cost.time[entry]), float(cost.memory[entry])


def _best_of(time: Array, memory: Array, objective: tuple[float, float]) -> Array:
    """The best alternative at every entry of a table. Most tables have but one."""
    if len(time) == 1:
        return np.zeros(time.shape[1], np.int64)
    return np.lexsort((time, memory, score(time, memory, np.array(objective))), axis=0)[0]


def _picked(time: Array, memory: Array, best: Array) -> tuple[Array, Array]:
    if len(time) == 1:
        return time[0], memory[0]
    entries = np.arange(time.shape[1])
    return time[best, entries], memory[best, entries]
