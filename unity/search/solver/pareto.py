"""The whole frontier of small problems: the elimination of variables over sets of (time, memory) points.

This is TensorOpt's frontier tracking (section 3.2, algorithm 2): every entry of a table holds the points that no other
beats. Tables are relations, one row for each point of each entry, and their sum is a join.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unity.search.solver.domains import Domains
from unity.search.solver.elimination_order import Choose, Eliminate, Factor, Leaf, Schedule, Slice
from unity.search.solver.nearby import Near
from unity.search.solver.problem import Array, Point, Problem, nondominated, points

# Where the entries alone are so many times the limit, forbidden ones will not make the difference.
HOPELESS = 4


class TooLarge(Exception):
    """More rows would be joined than allowed."""


@dataclass(frozen=True, eq=False)
class Relation:
    """Points of a table: their positions on its axes, their costs, and where they come from."""

    axes: dict[int, Array]  # by label (see `Eliminate`)
    time: Array
    memory: Array
    sources: tuple[Array, ...] = ()  # of a sum: the row in every table that was added
    alternative: Array | None = None  # of a leaf
    eliminated: Array | None = None  # of an elimination: the position of the variable

    def __len__(self) -> int:
        return len(self.time)

    def take(self, rows: Array) -> Relation:
        """Some of the rows, in the given order."""
        return Relation(
            {label: axis[rows] for label, axis in self.axes.items()},
            self.time[rows],
            self.memory[rows],
            tuple(source[rows] for source in self.sources),
            None if self.alternative is None else self.alternative[rows],
            None if self.eliminated is None else self.eliminated[rows],
        )


class Work:
    """Counts rows that are joined, down from a limit."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def spend(self, rows: int) -> None:
        self.left -= rows
        if self.left < 0:
            raise TooLarge


def pareto(problem: Problem, domains: Domains, schedule: Schedule, work: Work, near: Near | None = None) -> tuple[Point, ...]:
    """All points of the frontier, by ascending time; or all of it that is `near`, and others.

    Raises:
        TooLarge: more rows would be joined than `work` has left, or the schedule is not exact.
    """
    if not schedule.exact or (near is None and schedule.work > HOPELESS * work.left):
        raise TooLarge
    relations: list[Relation] = []
    for number, operation in enumerate(schedule.operations):
        match operation:
            case Leaf():
                made = _leaf(problem, domains, operation, work)
            case Eliminate(inputs):
                parts = [_labelled(relations[k], labels) for k, labels in inputs]
                made = _eliminate(_sum(parts, work, _Kept(near, number, inputs)))
            case Slice(table, axis):
                made = _sliced(relations[table], axis)
            case Choose():  # of one value
                made = Relation({}, np.zeros(0), np.zeros(0))
        relations.append(made if near is None or isinstance(operation, Slice | Choose) else _near(made, number, near))
    inputs = tuple((constant.operation, ()) for constant in schedule.constants)
    total = _sum([_labelled(relations[k], ()) for k, _ in inputs], work, _Kept(near, -1, inputs))
    values, alternatives = _decode(schedule, domains, relations, total)
    return nondominated(points(problem, values, alternatives, True))


def _leaf(problem: Problem, domains: Domains, leaf: Leaf, work: Work) -> Relation:
    scope, cost = problem.tables[leaf.table]
    kept = np.ix_(np.arange(len(cost.time)), *(domains.values[v] for v in scope))
    time, memory = cost.time[kept], cost.memory[kept]
    work.spend(time.size)
    alternative, *positions = np.nonzero(np.isfinite(time))
    rows = (alternative, *positions)
    axes = dict(enumerate(reversed(positions) if leaf.transposed else positions))
    return _undominated(Relation(axes, time[rows], memory[rows], alternative=alternative))


def _sliced(relation: Relation, axis: int) -> Relation:
    """The same rows without an axis, on which all have one position, as the one source of themselves."""
    axes = {label - (label > axis): positions for label, positions in relation.axes.items() if label != axis}
    return Relation(axes, relation.time, relation.memory, (np.arange(len(relation)),))


def _near(relation: Relation, number: int, near: Near) -> Relation:
    """The rows of an operation's table that some strategy near enough may have."""
    positions = [relation.axes[label] for label in range(len(relation.axes))]
    return relation.take(np.flatnonzero(near.has(number, positions, relation.time, relation.memory)))


def _labelled(relation: Relation, labels: Sequence[int]) -> Relation:
    """The same rows with other names for the axes, as the one source of themselves."""
    axes = {label: relation.axes[axis] for axis, label in enumerate(labels)}
    return Relation(axes, relation.time, relation.memory, (np.arange(len(relation)),))


@dataclass(frozen=True)
class _Kept:
    """Which rows of a sum of tables are kept: those that are `near`, if that is asked for."""

    near: Near | None
    number: int  # of the operation that the sum is for
    inputs: tuple[tuple[int, tuple[int, ...]], ...]

    def __call__(self, count: int, axes: dict[int, Array], time: Array, memory: Array) -> Array | None:
        """Of the first so many tables; nothing if all are."""
        if self.near is None:
            return None
        return np.flatnonzero(self.near.has_some(self.number, self.inputs[:count], axes, time, memory))


def _sum(inputs: Sequence[Relation], work: Work, kept: _Kept) -> Relation:
    """The points of the sum of tables (TensorOpt's product of frontiers), with their rows in every table."""
    total = Relation({}, np.zeros(1), np.zeros(1))
    for count, table in enumerate(inputs, 1):
        left, right = _matching(total, table, work)
        axes = {label: axis[left] for label, axis in total.axes.items()}
        axes |= {label: axis[right] for label, axis in table.axes.items()}
        time, memory = total.time[left] + table.time[right], total.memory[left] + table.memory[right]
        rows = kept(count, axes, time, memory)
        if rows is not None:
            left, right, time, memory = left[rows], right[rows], time[rows], memory[rows]
            axes = {label: axis[rows] for label, axis in axes.items()}
        sources = (*(source[left] for source in total.sources), *(source[right] for source in table.sources))
        total = _undominated(Relation(axes, time, memory, sources))
    return total


def _matching(a: Relation, b: Relation, work: Work) -> tuple[Array, Array]:
    """All pairs of rows that agree on the axes that both have."""
    shared = sorted(a.axes.keys() & b.axes.keys())
    key_a, key_b = (np.zeros(len(r), np.int64) for r in (a, b))
    for label in shared:
        size = 1 + max(a.axes[label].max(initial=0), b.axes[label].max(initial=0))
        key_a, key_b = key_a * size + a.axes[label], key_b * size + b.axes[label]
    order = np.argsort(key_b, kind="stable")
    first = np.searchsorted(key_b[order], key_a, "left")
    count = np.searchsorted(key_b[order], key_a, "right") - first
    pairs = int(count.sum())
    work.spend(pairs)
    left = np.repeat(np.arange(len(a)), count)
    return left, order[np.arange(pairs) - np.repeat(np.cumsum(count) - count, count) + first[left]]


def _eliminate(total: Relation) -> Relation:
    axes = {label - 1: axis for label, axis in total.axes.items() if label != 0}
    return _undominated(Relation(axes, total.time, total.memory, total.sources, eliminated=total.axes[0]))


def _undominated(relation: Relation) -> Relation:
    """Of the points of an entry, those that no other beats (TensorOpt, algorithm 1); of equal ones, the first."""
    entry, entries = np.zeros(len(relation), np.int64), 1
    for label in sorted(relation.axes):
        size = 1 + int(relation.axes[label].max(initial=0))
        entry, entries = entry * size + relation.axes[label], entries * size
    (time, times), (memory, memories) = _ranked(relation.time), _ranked(relation.memory)
    if entries * times * memories < 2**63:  # one key is sorted in half the time of three
        order = np.argsort((entry * times + time) * memories + memory, kind="stable")
    else:
        order = np.lexsort((memory, time, entry))
    # The running minimum of the memory must start anew at every entry: later entries are lower throughout.
    number = np.cumsum(np.diff(entry[order], prepend=-1) > 0)
    level = memory[order] - number * memories
    before = np.minimum.accumulate(level)
    keep = np.ones(len(level), bool)
    keep[1:] = level[1:] < before[:-1]
    return relation.take(order[keep])


def _ranked(costs: Array) -> tuple[Array, int]:
    """The rank of every cost among all different ones, and how many there are, or one if there are none."""
    order = np.argsort(costs)
    ascending, higher = costs[order], np.zeros(len(costs), bool)
    higher[1:] = ascending[1:] > ascending[:-1]
    ranks = np.empty(len(costs), np.int64)
    ranks[order] = np.cumsum(higher)
    return ranks, 1 + int(ranks.max(initial=0))


def _decode(schedule: Schedule, domains: Domains, relations: Sequence[Relation], total: Relation) -> tuple[Array, Array]:
    """Follows every point of the total back to the rows of the problem's own tables."""
    rows: dict[Factor, Array] = dict(zip(schedule.constants, total.sources, strict=True))
    values = np.zeros((len(total), len(domains.values)), np.int64)
    for step in reversed(schedule.steps):
        if step.chosen is not None:  # of one value
            values[:, step.variable] = domains.values[step.variable][0]
            rows.update((factor, rows[result]) for factor, result in zip(step.factors, step.results, strict=True))
            continue
        (result,) = step.results
        relation, own = relations[result.operation], rows[result]
        assert relation.eliminated is not None
        values[:, step.variable] = domains.values[step.variable][relation.eliminated[own]]
        for factor, source in zip(step.factors, relation.sources, strict=True):
            rows[factor] = source[own]
    alternatives = np.zeros((len(total), len(schedule.leaves)), np.int64)
    for table, leaf in enumerate(schedule.leaves):
        alternative = relations[leaf.operation].alternative
        assert alternative is not None
        alternatives[:, table] = alternative[rows[leaf]]
    return values, alternatives
