"""What the optimizer takes and gives: variables with finitely many values, and costs on them and on pairs of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Cost:
    """A table of costs: time and memory for every value of a variable, or for every pair of values of two.

    `time` and `memory` are float64 arrays, [alternatives, n] or [alternatives, n_first, n_second]. An alternative is an
    independent further choice at an entry of the table: to keep a gathered weight, or to gather it again. A time of
    infinity forbids the alternative there. Equal keys must mean equal tables, and what is equal is solved once; an
    empty key is replaced by a hash of the content.
    """

    key: str
    time: Array
    memory: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", np.asarray(self.time, np.float64))
        object.__setattr__(self, "memory", np.asarray(self.memory, np.float64))
        if self.time.shape != self.memory.shape or self.time.ndim not in (2, 3) or not len(self.time):
            raise ValueError(
                f"cost {self.key!r}: time {self.time.shape} and memory {self.memory.shape} must be equal: "
                "[alternatives, n] or [alternatives, n, m], with one alternative at least"
            )
        if not self.key:
            content = hashlib.blake2b(repr(self.time.shape).encode(), digest_size=16)
            content.update(self.time.tobytes())
            content.update(self.memory.tobytes())
            object.__setattr__(self, "key", content.hexdigest())

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.time.shape[1:]


@dataclass(frozen=True, eq=False)
class Edge:
    """A cost on two different variables. Several edges may join the same two, in either direction."""

    first: int
    second: int
    cost: Cost


@dataclass(frozen=True, eq=False)
class Problem:
    """Variables with `sizes` values each, a unary cost for every one, and costs on pairs."""

    sizes: tuple[int, ...]
    unary: tuple[Cost, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        if len(self.unary) != len(self.sizes):
            raise ValueError(f"{len(self.sizes)} variables, but {len(self.unary)} unary costs")
        for scope, cost in self.tables:
            if len(set(scope)) != len(scope) or not all(0 <= v < len(self.sizes) for v in scope):
                raise ValueError(f"cost {cost.key!r} is on variables {scope}: they must exist, and differ")
            if cost.sizes != tuple(self.sizes[v] for v in scope):
                raise ValueError(
                    f"cost {cost.key!r} is a table of {cost.sizes} values, but its variables {scope} have "
                    f"{tuple(self.sizes[v] for v in scope)}"
                )

    @property
    def tables(self) -> list[tuple[tuple[int, ...], Cost]]:
        """The variables and the cost of every table: first the unary ones, then the edges."""
        return [((v,), cost) for v, cost in enumerate(self.unary)] + [((e.first, e.second), e.cost) for e in self.edges]


@dataclass(frozen=True)
class Alternatives:
    """Which alternative was taken at the table of every variable, and of every edge."""

    unary: tuple[int, ...]
    edges: tuple[int, ...]


@dataclass(frozen=True)
class Point:
    """A value for every variable, an alternative for every table, and what they cost together.

    `exact` says that the point is proved optimal: for the weight it was found for, or as a member of a whole frontier.
    """

    time: float
    memory: float
    values: tuple[int, ...]
    alternatives: Alternatives
    exact: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class Objective:
    """The direction `time * a + memory * b`: what is minimized."""

    time: float
    memory: float

    @staticmethod
    def of(weight: float) -> Objective:
        """The objective time + weight * memory; memory alone for an infinite weight."""
        return Objective(0.0, 1.0) if np.isinf(weight) else Objective(1.0, float(weight))

    def __call__(self, time: Array, memory: Array) -> Array:
        """The objective's value: infinite where the time is."""
        forbidden = np.isinf(time)
        cost = self.time * np.where(forbidden, 0.0, time) + self.memory * np.where(forbidden, 0.0, memory)
        return np.where(forbidden, np.inf, cost)


def point_at(problem: Problem, values: Sequence[int], objective: Objective, exact: bool = True) -> Point:
    """The point with these values and at every table the best alternative; ties go to less memory, then lower index."""
    chosen = []
    for scope, cost in problem.tables:
        entry = (slice(None), *(values[v] for v in scope))
        time, memory = cost.time[entry], cost.memory[entry]
        chosen.append(0 if len(time) == 1 else int(np.lexsort((memory, objective(time, memory)))[0]))
    return point_of(problem, values, chosen, exact)


def point_of(problem: Problem, values: Sequence[int], alternatives: Sequence[int], exact: bool = True) -> Point:
    """The point with these values, and these alternatives at `problem.tables`, costed from the tables themselves."""
    time = memory = 0.0
    for (scope, cost), alternative in zip(problem.tables, alternatives, strict=True):
        entry = (alternative, *(values[v] for v in scope))
        time += float(cost.time[entry])
        memory += float(cost.memory[entry])
    taken = tuple(map(int, alternatives))
    unary = len(problem.unary)
    return Point(time, memory, tuple(map(int, values)), Alternatives(taken[:unary], taken[unary:]), exact)


def nondominated(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other beats (TensorOpt, algorithm 1), by ascending time; of equal ones, those proved, then
    those with the lowest values."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.time, p.memory, not p.exact, p.values, p.alternatives.unary, p.alternatives.edges)):
        if not kept or point.memory < kept[-1].memory:
            kept.append(point)
    return tuple(kept)
