"""How much all else adds to an entry of a table: the eliminations of a problem, backwards.

To eliminate variables one after another gives the best of what was eliminated, for every entry of a table. To go back from the last
to the first gives the best of all else. The two together are the best strategy that has the entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unity.search.solver.elimination import Elimination
from unity.search.solver.elimination_order import Eliminate, Slice
from unity.search.solver.problem import Array

Inputs = Sequence[tuple[int, tuple[int, ...]]]  # operations, and the labels of their tables' axes (see `Eliminate`)


@dataclass(frozen=True, eq=False)
class Near:
    """The strategies with time + weight * memory of at most so much, and what is known of them.

    `tables`: of every operation, what its entries cost at least; `rest`: what all else adds to them at least, wherever they stand;
    `best`: of what an elimination adds up, for all positions on its labels, what strategies that have them cost at least; `total`:
    what any costs.
    """

    weight: float
    most: float
    tables: Sequence[Array]
    rest: Sequence[Array]
    best: dict[int, Array]
    total: float

    def has(self, number: int, positions: Sequence[Array], time: Array, memory: Array) -> Array:
        """Which points of entries of an operation's table some such strategy may have."""
        return time + self.weight * memory + self.rest[number][tuple(positions)] <= self.most

    def has_some(self, number: int, inputs: Inputs, axes: dict[int, Array], time: Array, memory: Array) -> Array:
        """Which points of a sum of some of the tables that an elimination adds up some such strategy may have."""
        labels = sorted(axes)
        best = self.best[number] if number in self.best else np.array(self.total)
        least = best.min(axis=tuple(axis for axis in range(best.ndim) if axis not in labels))
        for k, own in inputs:
            missing = tuple(place for place, label in enumerate(labels) if label not in own)
            least = _without(least, np.expand_dims(self.tables[k].transpose(np.argsort(own)), missing))
        return time + self.weight * memory + least[tuple(axes[label] for label in labels)] <= self.most


def nearby(elimination: Elimination, weight: float, most: float) -> Near:
    """What strategies with so little have. The schedule must be exact.

    Equal operations are one: what is known of it is the least of all its places.
    """
    schedule = elimination.schedule
    tables = [table[0] for table in elimination.tables(np.array([[1.0, weight]]))]
    total = sum((tables[constant.operation] for constant in schedule.constants), np.zeros(()))
    rest, best = [np.full(table.shape, np.inf) for table in tables], dict[int, Array]()
    for constant in schedule.constants:
        _lower(rest[constant.operation], _without(total, tables[constant.operation]))
    for number in reversed(range(len(tables))):
        match schedule.operations[number]:
            case Eliminate(inputs):
                whole = best[number] = _whole(inputs, tables, rest[number])
                for k, labels in inputs:
                    least = whole.min(axis=tuple(axis for axis in range(whole.ndim) if axis not in labels))
                    _lower(rest[k], _without(least.transpose(np.argsort(np.argsort(labels))), tables[k]))
            case Slice(table, axis):
                _lower(rest[table], np.expand_dims(rest[number], axis))
            case _:
                pass
    return Near(weight, most, tables, rest, best, float(total))


def _whole(inputs: Inputs, tables: Sequence[Array], rest: Array) -> Array:
    """The sum of all that an elimination adds up, and of the rest: its axes are the labels."""
    total = rest[None]
    for number, labels in inputs:
        missing = tuple(axis for axis in range(1 + rest.ndim) if axis not in labels)
        total = total + np.expand_dims(tables[number].transpose(np.argsort(labels)), missing)
    return total


def _without(sums: Array, table: Array) -> Array:
    """What sums have without a table that is part of them."""
    allowed = np.isfinite(table)
    return np.where(allowed, sums - np.where(allowed, table, 0.0), np.inf)


def _lower(least: Array, other: Array) -> None:
    np.minimum(least, other, out=least)
