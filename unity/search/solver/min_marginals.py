"""Min-marginals: the least cost of the strategies that use each entry of a table, by eliminations in reverse.

Eliminating variables one after another gives for every entry of a table the least cost of everything eliminated. Going back from
the last elimination to the first gives the least cost of everything else. Their sum is that of the best strategy with the entry.
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
    """A test whether a strategy near the optimum may use an entry: one with time + weight * memory of at most `most`.

    Attributes:
        weight: seconds per byte.
        most: the limit of the objective.
        tables: for every operation, the least cost of its entries.
        rest: the least that everything else adds to them, over all places of the operation.
        best: for each elimination, the least cost of strategies by their positions on all of its labels.
        total: the least cost of any strategy.
    """

    weight: float
    most: float
    tables: Sequence[Array]
    rest: Sequence[Array]
    best: dict[int, Array]
    total: float

    def has(self, number: int, positions: Sequence[Array], time: Array, memory: Array) -> Array:
        """Return whether a near strategy may use each of some points of an operation's table.

        Args:
            number: the operation.
            positions: the position of each point's entry along each axis of the table.
            time: the seconds of each point.
            memory: its bytes.
        """
        return time + self.weight * memory + self.rest[number][tuple(positions)] <= self.most

    def has_some(self, number: int, inputs: Inputs, axes: dict[int, Array], time: Array, memory: Array) -> Array:
        """Return whether a near strategy may use each of some points of a sum of tables that an elimination adds up.

        Args:
            number: the elimination.
            inputs: the tables that are in the sum.
            axes: the position of each point's entry along each label of the sum.
            time: the seconds of each point.
            memory: its bytes.
        """
        labels = sorted(axes)
        best = self.best[number] if number in self.best else np.array(self.total)
        least = best.min(axis=tuple(axis for axis in range(best.ndim) if axis not in labels))
        for k, own in inputs:
            missing = tuple(place for place, label in enumerate(labels) if label not in own)
            least = _subtract(least, np.expand_dims(self.tables[k].transpose(np.argsort(own)), missing))
        return time + self.weight * memory + least[tuple(axes[label] for label in labels)] <= self.most


def nearby(elimination: Elimination, weight: float, most: float) -> Near:
    """Return the test for strategies near the optimum of an elimination whose schedule is exact.

    Equal operations are one, whose bounds are the least over all its places.
    """
    schedule = elimination.schedule
    tables = [table[0] for table in elimination.tables(np.array([[1.0, weight]]))]
    total = sum((tables[constant.operation] for constant in schedule.constants), np.zeros(()))
    rest, best = [np.full(table.shape, np.inf) for table in tables], dict[int, Array]()
    for constant in schedule.constants:
        _lower(rest[constant.operation], _subtract(total, tables[constant.operation]))
    for number in reversed(range(len(tables))):
        match schedule.operations[number]:
            case Eliminate(inputs):
                whole = best[number] = _total(inputs, tables, rest[number])
                for k, labels in inputs:
                    least = whole.min(axis=tuple(axis for axis in range(whole.ndim) if axis not in labels))
                    _lower(rest[k], _subtract(least.transpose(np.argsort(np.argsort(labels))), tables[k]))
            case Slice(table, axis):
                _lower(rest[table], np.expand_dims(rest[number], axis))
            case _:
                pass
    return Near(weight, most, tables, rest, best, float(total))


def _total(inputs: Inputs, tables: Sequence[Array], rest: Array) -> Array:
    """Return the sum of all tables that an elimination adds up, and of the rest. Its axes are the labels."""
    total = rest[None]
    for number, labels in inputs:
        missing = tuple(axis for axis in range(1 + rest.ndim) if axis not in labels)
        total = total + np.expand_dims(tables[number].transpose(np.argsort(labels)), missing)
    return total


def _subtract(sums: Array, table: Array) -> Array:
    """Subtract from sums a table that is part of them."""
    allowed = np.isfinite(table)
    return np.where(allowed, sums - np.where(allowed, table, 0.0), np.inf)


def _lower(least: Array, other: Array) -> None:
    np.minimum(least, other, out=least)
