"""The values of variables that some solution can use: values that the tables forbid outright are removed first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from unity.search.solver.problem import Array, Problem


@dataclass(frozen=True, eq=False)
class Domains:
    """For every variable its remaining values, ascending. Variables with equal values have equal names."""

    values: tuple[Array, ...]
    names: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.values))

    @property
    def empty(self) -> bool:
        """Whether some variable has no value left, so that the problem has no solution."""
        return not all(self.sizes)


def narrowed(domains: Domains, positions_of: Sequence[Array]) -> Domains:
    """Restrict domains to some of their values, given by their positions for every variable."""
    return _named(values[positions] for values, positions in zip(domains.values, positions_of, strict=True))


def _named(values: Iterable[Array]) -> Domains:
    arrays = tuple(values)
    named: dict[bytes, int] = {}
    return Domains(arrays, tuple(named.setdefault(array.tobytes(), len(named)) for array in arrays))


def all_values(problem: Problem) -> Domains:
    """Return the domains with every value, whatever the tables forbid."""
    return _named(np.arange(size) for size in problem.sizes)


def domains(problem: Problem) -> Domains:
    """Remove the values that a unary cost forbids, or that an edge forbids with every remaining value at its other end.

    This is arc consistency (Mackworth 1977, algorithm AC-3). It excludes no solution.
    """
    left = [cost.allowed for cost in problem.unary]
    forbidding = {cost.key: cost.allowed for cost, _, _ in problem.groups if not cost.allowed.all()}
    arcs: list[list[tuple[int, Array]]] = [[] for _ in problem.sizes]  # for each variable: a neighbour, and [neighbour, own]
    for edge in problem.edges:
        table = forbidding.get(edge.cost.key)
        if table is not None:
            arcs[edge.first].append((edge.second, table.T))
            arcs[edge.second].append((edge.first, table))
    changed = deque(v for v in range(len(problem.sizes)) if arcs[v])
    while changed:
        v = changed.popleft()
        for neighbour, table in arcs[v]:
            supported = left[neighbour] & table[:, left[v]].any(1)
            if supported.sum() < left[neighbour].sum():
                left[neighbour] = supported
                changed.append(neighbour)
    return _named(np.flatnonzero(mask) for mask in left)
