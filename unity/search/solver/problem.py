"""The optimizer's input and output: variables with finitely many values, costs on them and on pairs of them, and solutions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Cost:
    """A table of costs: time and memory for every value of a variable, or for every pair of values of two.

    `time` and `memory` are float64 arrays, [alternatives, n] or [alternatives, n_first, n_second]. An alternative is an independent
    further choice at an entry of the table: to keep a gathered weight, or to gather it again. A time of infinity forbids the
    alternative there. Equal keys must mean equal tables, and equal tables are solved once; an empty key is replaced by a hash of
    the content.
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
        if not (np.isfinite(self.memory) | ~np.isfinite(self.time)).all():
            raise ValueError(f"cost {self.key!r}: memory is not finite where time is; forbid by an infinite time")
        if not self.key:
            content = hashlib.blake2b(repr(self.time.shape).encode(), digest_size=16)
            content.update(self.time.tobytes())
            content.update(self.memory.tobytes())
            object.__setattr__(self, "key", content.hexdigest())

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.time.shape[1:]

    @cached_property
    def allowed(self) -> Array:
        """The entries of the table that some alternative allows, computed once for all programs that share it."""
        return np.asarray(np.isfinite(self.time).any(0))


@dataclass(frozen=True, eq=False)
class Edge:
    """A cost on two different variables. Several edges may join the same two, in either direction."""

    first: int
    second: int
    cost: Cost


@dataclass(frozen=True, eq=False)
class Problem:
    """Variables with `sizes` values each, a unary cost for every variable, and costs on pairs."""

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

    @cached_property
    def tables(self) -> tuple[tuple[tuple[int, ...], Cost], ...]:
        """The variables and the cost of every table: first the unary ones, then the edges."""
        unary = (((v,), cost) for v, cost in enumerate(self.unary))
        return (*unary, *(((edge.first, edge.second), edge.cost) for edge in self.edges))

    @cached_property
    def entries(self) -> int:
        """The number of pairs of values of all neighbours."""
        return sum(self.sizes[edge.first] * self.sizes[edge.second] for edge in self.edges)

    @cached_property
    def groups(self) -> tuple[tuple[Cost, Array, Array], ...]:
        """Every distinct cost, with the indices of its tables and their variables, [tables, 1 or 2]."""
        indices: dict[str, list[int]] = {}
        for index, (_, cost) in enumerate(self.tables):
            indices.setdefault(cost.key, []).append(index)
        return tuple(
            (self.tables[same[0]][1], np.array(same), np.array([self.tables[i][0] for i in same])) for same in indices.values()
        )


@dataclass(frozen=True)
class Alternatives:
    """The alternative chosen at the table of every variable, and of every edge."""

    unary: tuple[int, ...]
    edges: tuple[int, ...]


@dataclass(frozen=True)
class Point:
    """A value for every variable, an alternative for every table, and what they cost together.

    `exact` says that the point is proved optimal: for its weight, or as a member of a whole frontier.
    """

    time: float
    memory: float
    values: tuple[int, ...]
    alternatives: Alternatives
    exact: bool = field(default=True, compare=False)


def direction(weight: float) -> tuple[float, float]:
    """Return the factors of time and memory in the objective time + weight * memory; an infinite weight means memory alone."""
    return (0.0, 1.0) if np.isinf(weight) else (1.0, float(weight))


def score(time: Array, memory: Array, directions: Array) -> Array:
    """Return the objective in every direction, infinite where the time is. `directions`: [..., 2], broadcast with the rest."""
    allowed = np.isfinite(time)
    if allowed.all():
        return directions[..., 0] * time + directions[..., 1] * memory
    time, memory = np.where(allowed, time, 0.0), np.where(allowed, memory, 0.0)
    return np.where(allowed, directions[..., 0] * time + directions[..., 1] * memory, np.inf)


def best_alternatives(problem: Problem, values: Array, directions: Array) -> Array:
    """Return for points with `values` [points, variables] the best alternative at every table, [points, tables].

    Each point has its own direction, [points, 2]. Ties go to less memory, then to the lower index.
    """
    best = np.zeros((len(values), len(problem.tables)), np.int64)
    for cost, indices, scopes in problem.groups:
        if len(cost.time) > 1:
            entries = (slice(None), *(values[:, variables] for variables in scopes.T))
            time, memory = cost.time[entries], cost.memory[entries]
            order = np.lexsort((memory, score(time, memory, directions[:, None, :])), axis=0)
            best[:, indices] = order[0]
    return best


def points(problem: Problem, values: Array, alternatives: Array, exact: bool) -> list[Point]:
    """Return the points with `values` [points, variables] and `alternatives` [points, tables], with costs from the tables."""
    time = np.empty(alternatives.shape)
    memory = np.empty(alternatives.shape)
    for cost, indices, scopes in problem.groups:
        entries = (alternatives[:, indices], *(values[:, variables] for variables in scopes.T))
        time[:, indices] = cost.time[entries]
        memory[:, indices] = cost.memory[entries]
    unary = len(problem.unary)
    return [
        Point(float(t), float(m), tuple(v), Alternatives(tuple(chosen[:unary]), tuple(chosen[unary:])), exact)
        for t, m, v, chosen in zip(time.sum(1), memory.sum(1), values.tolist(), alternatives.tolist(), strict=True)
    ]


def nondominated(candidates: Iterable[Point]) -> tuple[Point, ...]:
    """Return the points that no other dominates (TensorOpt, algorithm 1), by ascending time; of equal ones, the first."""
    front: list[Point] = []
    for point in sorted(candidates, key=lambda p: (p.time, p.memory)):
        if not front or point.memory < front[-1].memory:
            front.append(point)
    return tuple(front)
