"""The order in which variables are eliminated, and which eliminations are equal, decided without touching a table.

OptCNN's node and edge elimination (section 5.2), and TensorOpt's branch and heuristic elimination and linear dynamic programming
(section 3.2), are one operation here: the tables that contain a variable are added up and minimized over its values. The degree of
the variable makes it branch elimination (1: a chain eliminated from its end is linear dynamic programming), node elimination
(2), or the general case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from math import prod

from unity.search.solver.domains import Domains
from unity.search.solver.problem import Problem


@dataclass(frozen=True)
class InputTable:
    """One of the problem's tables, restricted to the remaining values, with its axes by ascending variable."""

    key: str
    domains: tuple[int, ...]  # for each axis, a number that identifies its remaining values
    transposed: bool
    table: int = field(compare=False)  # the index in `problem.tables` of one that is equal to this


@dataclass(frozen=True)
class Eliminate:
    """The sum of tables, minimized over one variable. Axes have labels: 0 is the variable, 1, 2, … its neighbours."""

    inputs: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Choose:
    """The value of a variable that is best by its own cost and, on every edge, by its best neighbour."""

    inputs: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Slice:
    """A table at the value that a `Choose` gave to one of its axes."""

    table: int
    axis: int
    choice: int


Operation = InputTable | Eliminate | Choose | Slice

CROWDED = 30  # neighbours beyond which those with one value are fixed, since an array has at most 64 dimensions


@dataclass(frozen=True, eq=False)
class TableFactor:
    """The table of an operation at one place in the problem: on these variables, in ascending order."""

    scope: tuple[int, ...]
    operation: int


@dataclass(frozen=True, eq=False)
class EliminationStep:
    """The elimination of a variable: the factors that contained it, and the factors that replace them.

    `results` is one factor on the neighbours; after heuristic elimination, one for each of the factors.
    """

    variable: int
    factors: tuple[TableFactor, ...]
    results: tuple[TableFactor, ...]
    chosen: int | None = None  # the `Choose` of a heuristic elimination
    single: bool = False  # whether the variable had only one value, so that fixing it loses nothing


@dataclass(frozen=True, eq=False)
class EliminationSchedule:
    """All operations, each after its inputs, all steps, and the remaining factors without variables."""

    operations: tuple[Operation, ...]
    shapes: tuple[tuple[int, ...], ...]
    leaves: tuple[TableFactor, ...]  # one for each of `problem.tables`
    steps: tuple[EliminationStep, ...]
    constants: tuple[TableFactor, ...]

    @property
    def exact(self) -> bool:
        """Whether no variable with a choice was fixed by heuristic elimination."""
        return all(step.chosen is None or step.single for step in self.steps)

    @property
    def work(self) -> int:
        """The number of sums that eliminations compute for one objective; equal eliminations count once."""
        total = 0
        for operation, shape in zip(self.operations, self.shapes, strict=True):
            if isinstance(operation, Eliminate) and operation.inputs:
                number, labels = operation.inputs[0]
                total += prod(shape) * self.shapes[number][labels.index(0)]
        return total

    @property
    def products(self) -> int:
        """The number of eliminations with a result on two variables or more; equal ones count once."""
        return sum(isinstance(o, Eliminate) and len(s) > 1 for o, s in zip(self.operations, self.shapes, strict=True))


def schedule(problem: Problem, domains: Domains, budget: int) -> EliminationSchedule:
    """Eliminate every variable: exactly while no table exceeds `budget` entries, else by fixing a variable."""
    elimination = _EliminationOrder(problem, domains, budget)
    elimination.run()
    constants = tuple(sorted((f for f in elimination.factors if not f.scope), key=lambda f: f.operation))
    return EliminationSchedule(
        tuple(elimination.operations),
        tuple(elimination.shapes),
        tuple(elimination.leaves),
        tuple(elimination.steps),
        constants,
    )


class _EliminationOrder:
    """The remaining factors while variables are eliminated.

    Operations are interned: equal ones are one, so that all copies of a repeated segment are computed together.
    """

    def __init__(self, problem: Problem, domains: Domains, budget: int) -> None:
        self.sizes = domains.sizes
        self.budget = budget
        self.numbers: dict[Operation, int] = {}
        self.operations: list[Operation] = []
        self.shapes: list[tuple[int, ...]] = []
        self.steps: list[EliminationStep] = []
        self.factors: list[TableFactor] = []
        self.at: list[dict[int, TableFactor]] = [{} for _ in self.sizes]  # the factors on a variable, by identity
        self.factor_counts: list[dict[int, int]] = [{} for _ in self.sizes]  # by neighbour, the number of factors on both
        self.entries = [1] * len(self.sizes)  # of the table that eliminating a variable produces
        self.alive = set(range(len(self.sizes)))
        self.signatures: dict[int, Eliminate] = {}  # equal ones are one object
        self._interned: dict[Eliminate, Eliminate] = {}
        self.factored: dict[int, tuple[TableFactor, ...]] = {}  # a variable's factors, in the order of its signature's inputs
        self._neighbours: dict[int, tuple[int, ...]] = {}
        self._by_entries: dict[int, set[int]] = {}  # variables by `entries`
        self._nodes: set[int] = set()  # variables with at most two neighbours
        self._unindexed = set(self.alive)  # remaining variables that are in neither `_by_entries` nor `_nodes`
        self._fills: dict[int, int] = {}  # the edges that a variable's elimination adds
        self._inputs_by_content: dict[tuple[str, int, int, bool, int], int] = {}  # operations of the problem's tables, by content
        self.leaves = [self._leaf(i, scope, cost.key, domains) for i, (scope, cost) in enumerate(problem.tables)]
        for leaf in self.leaves:
            self._add(leaf)

    def _leaf(self, index: int, scope: tuple[int, ...], key: str, domains: Domains) -> TableFactor:
        ordered = scope if scope[0] <= scope[-1] else scope[::-1]
        names = domains.names
        same = (key, names[scope[0]], names[scope[-1]], ordered is scope, len(scope))
        if same not in self._inputs_by_content:
            leaf = InputTable(key, tuple(names[v] for v in scope), ordered is not scope, index)
            self._inputs_by_content[same] = self._number(leaf, tuple(self.sizes[v] for v in ordered))
        return TableFactor(ordered, self._inputs_by_content[same])

    def _number(self, operation: Operation, shape: tuple[int, ...]) -> int:
        number = self.numbers.setdefault(operation, len(self.operations))
        if number == len(self.operations):
            self.operations.append(operation)
            self.shapes.append(shape)
        return number

    def _add(self, factor: TableFactor) -> None:
        if not factor.scope:
            self.factors.append(factor)
        for v in factor.scope:
            self._forget(v)
            self.at[v][id(factor)] = factor
            counts = self.factor_counts[v]
            for n in factor.scope:
                if n != v:
                    if n not in counts:
                        self.entries[v] *= self.sizes[n]
                    counts[n] = counts.get(n, 0) + 1

    def _remove(self, variable: int) -> tuple[TableFactor, ...]:
        removed = tuple(self.at[variable].values())
        self._forget(variable)
        self.alive.discard(variable)
        self._unindexed.discard(variable)
        for factor in removed:
            for v in factor.scope:
                if v != variable:
                    self._forget(v)
                    self._detach(factor, v)
        self.at[variable], self.factor_counts[variable] = {}, {}
        return removed

    def _detach(self, factor: TableFactor, variable: int) -> None:
        """Remove a factor from one of its variables."""
        del self.at[variable][id(factor)]
        counts = self.factor_counts[variable]
        for n in factor.scope:
            if n != variable:
                counts[n] -= 1
                if not counts[n]:
                    del counts[n]
                    self.entries[variable] //= self.sizes[n]

    def _forget(self, variable: int) -> None:
        """Drop everything cached about a variable whose factors are about to change."""
        if variable not in self._unindexed:
            self._unindexed.add(variable)
            self._nodes.discard(variable)
            others = self._by_entries[self.entries[variable]]
            others.remove(variable)
            if not others:
                del self._by_entries[self.entries[variable]]
        for cache in (self.signatures, self.factored, self._neighbours, self._fills):
            cache.pop(variable, None)

    def _index(self) -> None:
        """Put variables into `_by_entries` and `_nodes`."""
        for v in self._unindexed:
            self._by_entries.setdefault(self.entries[v], set()).add(v)
            if len(self.factor_counts[v]) <= 2:
                self._nodes.add(v)
        self._unindexed.clear()

    def neighbours(self, variable: int) -> tuple[int, ...]:
        """Return the variables that share a factor with one, ascending."""
        if variable not in self._neighbours:
            self._neighbours[variable] = tuple(sorted(self.factor_counts[variable]))
        return self._neighbours[variable]

    def run(self) -> None:
        self._singles()
        self._branches(sorted(self.alive))
        while self.alive:
            self._index()
            chosen = self._round(sorted(self._nodes)) or self._smallest()
            crowd = self._crowd(chosen)
            if crowd:
                touched = {n for v in crowd for n in self._fix(v)}
            elif chosen:
                touched = {n for v in chosen for n in self.neighbours(v)}
                for v in chosen:
                    self._eliminate(v)
            else:
                touched = self._fix(min(self.alive, key=lambda v: (-len(self.factor_counts[v]), self.sizes[v], v)))
            self._branches(sorted(touched & self.alive))

    def _singles(self) -> None:
        """Fix variables with one value and many neighbours, since eliminating one would join all its neighbours.

        A weight of an unrolled network is such a variable in searches that give it a single placement.
        """
        for v in sorted(self.alive):
            if self.sizes[v] == 1 and len(self.factor_counts[v]) > CROWDED:
                self._fix(v)

    def _crowd(self, chosen: Iterable[int]) -> list[int]:
        """Return the one-valued neighbours of variables with many neighbours, since elimination would give each of them an axis."""
        many = (self.neighbours(v) for v in chosen if len(self.factor_counts[v]) > CROWDED)
        return sorted({n for neighbours in many for n in neighbours if self.sizes[n] == 1})

    def _branches(self, variables: Iterable[int]) -> None:
        """Eliminate variables with at most one neighbour until there are none, which costs no more than reading their tables."""
        queue = deque(variables)
        while queue:
            v = queue.popleft()
            if v in self.alive and len(self.factor_counts[v]) <= 1:
                neighbours = self.neighbours(v)
                self._eliminate(v)
                queue.extend(neighbours)

    def _round(self, nodes: list[int]) -> list[int]:
        """Return variables to eliminate together: no two are neighbours, and none costs more than a neighbour that qualifies.

        Equal eliminations are chosen or left together, the cheapest first; so repeated segments stay equal, and a ring of equal
        segments is halved.
        """
        classes: dict[Eliminate, list[int]] = {}
        for v in nodes:
            classes.setdefault(self._signature(v), []).append(v)
        work = {v: self.entries[v] * self.sizes[v] for v in nodes}
        chosen: list[int] = []
        blocked: set[int] = set()
        for members in sorted(classes.values(), key=lambda members: (work[members[0]], -len(members), members[0])):
            for v in members:
                neighbours = self.neighbours(v)
                cheapest = all(work[v] <= work.get(n, work[v]) for n in neighbours)
                if cheapest and self.entries[v] <= self.budget and not blocked.intersection(neighbours):
                    chosen.append(v)
                    blocked.add(v)
        return chosen

    def _smallest(self) -> list[int]:
        """Return the variable whose elimination gives the smallest table and then adds the fewest edges, and others like it."""
        least = min(self._by_entries)
        if least > self.budget:
            return []
        candidates = self._by_entries[least]
        best = min(candidates, key=lambda v: (self._fill(v), v))
        signature, count = self._signature(best), len(self.at[best])
        chosen: list[int] = []
        for v in sorted(v for v in candidates if len(self.at[v]) == count and self._signature(v) is signature):
            if self.factor_counts[v].keys().isdisjoint(chosen):
                chosen.append(v)
        return chosen

    def _fill(self, variable: int) -> int:
        """Return the number of edges that a variable's elimination adds: pairs of neighbours that are not neighbours yet."""
        if variable not in self._fills:
            pairs = combinations(self.neighbours(variable), 2)
            self._fills[variable] = sum(b not in self.factor_counts[a] for a, b in pairs)
        return self._fills[variable]

    def _signature(self, variable: int) -> Eliminate:
        if variable not in self.signatures:
            inputs = self._inputs(variable)
            signature = Eliminate(tuple((f.operation, labels) for f, labels in inputs))
            self.signatures[variable] = self._interned.setdefault(signature, signature)
            self.factored[variable] = tuple(f for f, _ in inputs)
        return self.signatures[variable]

    def _inputs(self, variable: int) -> list[tuple[TableFactor, tuple[int, ...]]]:
        label = {v: i for i, v in enumerate((variable, *self.neighbours(variable)))}
        labelled = [(f, tuple(label[v] for v in f.scope)) for f in self.at[variable].values()]
        return sorted(labelled, key=lambda pair: (pair[1], pair[0].operation))

    def _eliminate(self, variable: int) -> None:
        neighbours = self.neighbours(variable)
        number = self._number(self._signature(variable), tuple(self.sizes[v] for v in neighbours))
        factors = self.factored[variable]
        if self._fills:
            self._forget_fills(neighbours)
        self._remove(variable)
        result = TableFactor(neighbours, number)
        self._add(result)
        self.steps.append(EliminationStep(variable, factors, (result,)))

    def _forget_fills(self, joined: tuple[int, ...]) -> None:
        """Drop the fills of the common neighbours of each pair of `joined` that becomes adjacent."""
        for a, b in combinations(joined, 2):
            if b not in self.factor_counts[a]:
                for common in self.factor_counts[a].keys() & self.factor_counts[b].keys():
                    self._fills.pop(common, None)

    def _fix(self, variable: int) -> set[int]:
        """Fix a variable by heuristic elimination, as TensorOpt does with an attention mask. Returns its neighbours."""
        neighbours = self.neighbours(variable)
        inputs = self._inputs(variable)
        choice = self._number(Choose(tuple((f.operation, labels) for f, labels in inputs)), ())
        self._remove(variable)
        results = []
        for f, _ in inputs:
            axis = f.scope.index(variable)
            scope = f.scope[:axis] + f.scope[axis + 1 :]
            number = self._number(Slice(f.operation, axis, choice), tuple(self.sizes[v] for v in scope))
            results.append(TableFactor(scope, number))
            self._add(results[-1])
        self.steps.append(EliminationStep(variable, tuple(f for f, _ in inputs), tuple(results), choice, self.sizes[variable] == 1))
        return set(neighbours)
