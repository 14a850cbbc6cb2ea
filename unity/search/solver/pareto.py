"""The whole frontier of small problems: the elimination of variables over sets of (time, memory) points.

This is TensorOpt's frontier tracking (section 3.2, algorithm 2): every entry of a table holds its nondominated points. Tables are
relations with one row for each point of each entry, and their sum is a join.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unity.search.solver.domains import Domains
from unity.search.solver.elimination_order import Choose, Eliminate, EliminationSchedule, InputTable, Slice, TableFactor
from unity.search.solver.min_marginals import Near
from unity.search.solver.problem import Array, Point, Problem, nondominated, points

# If the sums are this many times the limit, removing forbidden entries will not bring the rows below it.
HOPELESS = 4


class JoinTooLarge(Exception):
    """More rows would be joined than allowed."""


@dataclass(frozen=True, eq=False)
class Relation:
    """Points of a table: their positions on its axes, their costs, and their sources."""

    axes: dict[int, Array]  # by label (see `Eliminate`)
    time: Array
    memory: Array
    sources: tuple[Array, ...] = ()  # for a sum, the row in every table that was added
    alternative: Array | None = None  # for one of the problem's tables
    eliminated: Array | None = None  # for an elimination, the position of the variable

    def __len__(self) -> int:
        return len(self.time)

    def take(self, rows: Array) -> Relation:
        """Return some of the rows, in the given order."""
        return Relation(
            {label: axis[rows] for label, axis in self.axes.items()},
            self.time[rows],
            self.memory[rows],
            tuple(source[rows] for source in self.sources),
            None if self.alternative is None else self.alternative[rows],
            None if self.eliminated is None else self.eliminated[rows],
        )


class JoinBudget:
    """A budget of rows to join."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def spend(self, rows: int) -> None:
        self.left -= rows
        if self.left < 0:
            raise JoinTooLarge


def pareto(
    problem: Problem, domains: Domains, schedule: EliminationSchedule, work: JoinBudget, near: Near | None = None
) -> tuple[Point, ...]:
    """Return all points of the frontier, by ascending time; with `near`, all that are near enough, and possibly others.

    Raises:
        JoinTooLarge: more rows would be joined than `work` has left, or the schedule is not exact.
    """
    if not schedule.exact or (near is None and schedule.work > HOPELESS * work.left):
        raise JoinTooLarge
    relations: list[Relation] = []
    for number, operation in enumerate(schedule.operations):
        match operation:
            case InputTable():
                relation = _leaf(problem, domains, operation, work)
            case Eliminate(inputs):
                parts = [_labelled(relations[k], labels) for k, labels in inputs]
                relation = _eliminate(_sum(parts, work, _RowFilter(near, number, inputs)))
            case Slice(table, axis):
                relation = _sliced(relations[table], axis)
            case Choose():  # of one value
                relation = Relation({}, np.zeros(0), np.zeros(0))
        relations.append(relation if near is None or isinstance(operation, Slice | Choose) else _near(relation, number, near))
    inputs = tuple((constant.operation, ()) for constant in schedule.constants)
    total = _sum([_labelled(relations[k], ()) for k, _ in inputs], work, _RowFilter(near, -1, inputs))
    values, alternatives = _decode(schedule, domains, relations, total)
    return nondominated(points(problem, values, alternatives, True))


def _leaf(problem: Problem, domains: Domains, leaf: InputTable, work: JoinBudget) -> Relation:
    scope, cost = problem.tables[leaf.table]
    cells = np.ix_(np.arange(len(cost.time)), *(domains.values[v] for v in scope))
    time, memory = cost.time[cells], cost.memory[cells]
    work.spend(time.size)
    alternative, *positions = np.nonzero(np.isfinite(time))
    rows = (alternative, *positions)
    axes = dict(enumerate(reversed(positions) if leaf.transposed else positions))
    return _undominated(Relation(axes, time[rows], memory[rows], alternative=alternative))


def _sliced(relation: Relation, axis: int) -> Relation:
    """Return the rows without an axis on which all have one position. Each row is its own source."""
    axes = {label - (label > axis): positions for label, positions in relation.axes.items() if label != axis}
    return Relation(axes, relation.time, relation.memory, (np.arange(len(relation)),))


def _near(relation: Relation, number: int, near: Near) -> Relation:
    """Return the rows of an operation's table that some strategy near enough may use."""
    positions = [relation.axes[label] for label in range(len(relation.axes))]
    return relation.take(np.flatnonzero(near.has(number, positions, relation.time, relation.memory)))


def _labelled(relation: Relation, labels: Sequence[int]) -> Relation:
    """Return the rows with other names for the axes. Each row is its own source."""
    axes = {label: relation.axes[axis] for axis, label in enumerate(labels)}
    return Relation(axes, relation.time, relation.memory, (np.arange(len(relation)),))


@dataclass(frozen=True)
class _RowFilter:
    """A filter for the rows of a sum of tables: those that strategies `near` enough may use, if that is given."""

    near: Near | None
    number: int  # of the operation that the sum is for
    inputs: tuple[tuple[int, tuple[int, ...]], ...]

    def __call__(self, count: int, axes: dict[int, Array], time: Array, memory: Array) -> Array | None:
        """Return the rows of the sum of the first `count` tables that pass; None if all do."""
        if self.near is None:
            return None
        return np.flatnonzero(self.near.has_some(self.number, self.inputs[:count], axes, time, memory))


def _sum(inputs: Sequence[Relation], work: JoinBudget, row_filter: _RowFilter) -> Relation:
    """Return the points of the sum of tables (TensorOpt's product of frontiers), with their rows in every table."""
    total = Relation({}, np.zeros(1), np.zeros(1))
    for count, table in enumerate(inputs, 1):
        left, right = _matching(total, table, work)
        axes = {label: axis[left] for label, axis in total.axes.items()}
        axes |= {label: axis[right] for label, axis in table.axes.items()}
        time, memory = total.time[left] + table.time[right], total.memory[left] + table.memory[right]
        rows = row_filter(count, axes, time, memory)
        if rows is not None:
            left, right, time, memory = left[rows], right[rows], time[rows], memory[rows]
            axes = {label: axis[rows] for label, axis in axes.items()}
        sources = (*(source[left] for source in total.sources), *(source[right] for source in table.sources))
        total = _undominated(Relation(axes, time, memory, sources))
    return total


def _matching(a: Relation, b: Relation, work: JoinBudget) -> tuple[Array, Array]:
    """Return all pairs of rows that agree on the axes that both have."""
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
    """Return the nondominated points of each entry (TensorOpt, algorithm 1); of equal ones, the first."""
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
    """Return the rank of every cost among the distinct ones, and their number, or one if there are none."""
    order = np.argsort(costs)
    ascending, higher = costs[order], np.zeros(len(costs), bool)
    higher[1:] = ascending[1:] > ascending[:-1]
    ranks = np.empty(len(costs), np.int64)
    ranks[order] = np.cumsum(higher)
    return ranks, 1 + int(ranks.max(initial=0))


def _decode(schedule: EliminationSchedule, domains: Domains, relations: Sequence[Relation], total: Relation) -> tuple[Array, Array]:
    """Trace every point of the total back to rows of the problem's own tables."""
    rows: dict[TableFactor, Array] = dict(zip(schedule.constants, total.sources, strict=True))
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
