"""The order in which variables are eliminated, and which eliminations are the same: decided without touching a table.

OptCNN's node and edge elimination (section 5.2), and TensorOpt's branch and heuristic elimination and linear dynamic
programming (section 3.2), are one operation here: to eliminate a variable is to add up the tables that have it, and to
minimize over its values. Its degree makes it branch elimination (1: a chain eliminated from its end is the linear
dynamic programming), node elimination (2), or the general case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from unity.search.solver.domains import Domains
from unity.search.solver.problem import Problem


@dataclass(frozen=True)
class Leaf:
    """One of the problem's tables, cut down to the values that are left, its axes by ascending variable."""

    key: str
    kept: tuple[int, ...]  # of each axis: a number that stands for the values left
    transposed: bool
    table: int = field(compare=False)  # index in `problem.tables` of one that is like this


@dataclass(frozen=True)
class Eliminate:
    """The sum of tables, minimized over one variable. Axes are labelled: 0 is the variable, 1, 2, … its neighbours."""

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


Operation = Leaf | Eliminate | Choose | Slice

AROUND = 30  # neighbours of a variable from which on those of one value are fixed: an array has 64 dimensions at most


@dataclass(frozen=True, eq=False)
class Factor:
    """The table of an operation at one place in the problem: on these variables, in ascending order."""

    scope: tuple[int, ...]
    operation: int


@dataclass(frozen=True, eq=False)
class Step:
    """The elimination of a variable: the factors that had it, and what came of them.

    `results` is one factor on the neighbours; after heuristic elimination, one for each of the factors.
    """

    variable: int
    factors: tuple[Factor, ...]
    results: tuple[Factor, ...]
    chosen: int | None = None  # the `Choose` of a heuristic elimination
    single: bool = False  # whether the variable had but one value, so that fixing it loses nothing


@dataclass(frozen=True, eq=False)
class Schedule:
    """All operations, each after those it needs, all steps, and the factors without variables that remain."""

    operations: tuple[Operation, ...]
    shapes: tuple[tuple[int, ...], ...]
    leaves: tuple[Factor, ...]  # one for each of `problem.tables`
    steps: tuple[Step, ...]
    constants: tuple[Factor, ...]

    @property
    def exact(self) -> bool:
        """Whether no variable with a choice had to be fixed by heuristic elimination."""
        return all(step.chosen is None or step.single for step in self.steps)

    @property
    def work(self) -> int:
        """Sums that eliminations look at, for one objective; equal eliminations counted once."""
        total = 0
        for operation, shape in zip(self.operations, self.shapes, strict=True):
            if isinstance(operation, Eliminate) and operation.inputs:
                number, labels = operation.inputs[0]
                total += prod(shape) * self.shapes[number][labels.index(0)]
        return total

    @property
    def products(self) -> int:
        """Eliminations with a result on two variables or more, equal ones counted once."""
        return sum(isinstance(o, Eliminate) and len(s) > 1 for o, s in zip(self.operations, self.shapes, strict=True))


def schedule(problem: Problem, domains: Domains, budget: int) -> Schedule:
    """Eliminates every variable: exactly while no table exceeds `budget` entries, else by fixing a variable."""
    elimination = _Elimination(problem, domains, budget)
    elimination.run()
    constants = tuple(sorted((f for f in elimination.factors if not f.scope), key=lambda f: f.operation))
    return Schedule(
        tuple(elimination.operations),
        tuple(elimination.shapes),
        tuple(elimination.leaves),
        tuple(elimination.steps),
        constants,
    )


class _Elimination:
    """The factors that are left, while variables disappear.

    Operations are interned: equal ones are one, so that all copies of a repeated segment are computed together.
    """

    def __init__(self, problem: Problem, domains: Domains, budget: int) -> None:
        self.sizes = domains.sizes
        self.budget = budget
        self.numbers: dict[Operation, int] = {}
        self.operations: list[Operation] = []
        self.shapes: list[tuple[int, ...]] = []
        self.steps: list[Step] = []
        self.factors: list[Factor] = []
        self.at: list[list[Factor]] = [[] for _ in self.sizes]
        self.alive = set(range(len(self.sizes)))
        self.signatures: dict[int, Eliminate] = {}
        self.factored: dict[int, tuple[Factor, ...]] = {}  # with the signatures, the factors in that order
        self.around: dict[int, tuple[int, ...]] = {}  # neighbours, as long as they are these
        self.sets: dict[int, frozenset[int]] = {}  # the same
        self.counts: dict[int, int] = {}  # and the entries of a table on them
        self.known: dict[tuple[str, int, int, bool, int], int] = {}  # leaves, by what they are equal in
        self.leaves = [self._leaf(i, scope, cost.key, domains) for i, (scope, cost) in enumerate(problem.tables)]
        for leaf in self.leaves:
            self._add(leaf)

    def _leaf(self, index: int, scope: tuple[int, ...], key: str, domains: Domains) -> Factor:
        ordered = scope if scope[0] <= scope[-1] else scope[::-1]
        names = domains.names
        same = (key, names[scope[0]], names[scope[-1]], ordered is scope, len(scope))
        if same not in self.known:
            leaf = Leaf(key, tuple(names[v] for v in scope), ordered is not scope, index)
            self.known[same] = self._number(leaf, tuple(self.sizes[v] for v in ordered))
        return Factor(ordered, self.known[same])

    def _number(self, operation: Operation, shape: tuple[int, ...]) -> int:
        number = self.numbers.setdefault(operation, len(self.operations))
        if number == len(self.operations):
            self.operations.append(operation)
            self.shapes.append(shape)
        return number

    def _add(self, factor: Factor) -> None:
        if not factor.scope:
            self.factors.append(factor)
        for v in factor.scope:
            self.at[v].append(factor)
            self._forget(v)

    def _remove(self, variable: int) -> tuple[Factor, ...]:
        removed = tuple(self.at[variable])
        for neighbour in self.neighbours(variable):
            self.at[neighbour] = [f for f in self.at[neighbour] if variable not in f.scope]
            self._forget(neighbour)
        self._forget(variable)
        self.alive.discard(variable)
        self.at[variable] = []
        return removed

    def _forget(self, variable: int) -> None:
        """What is known of a variable is so no longer: its factors are others."""
        for known in (self.signatures, self.factored, self.around, self.counts, self.sets):
            known.pop(variable, None)

    def neighbours(self, variable: int) -> tuple[int, ...]:
        if variable not in self.around:
            self.around[variable] = tuple(sorted({v for f in self.at[variable] for v in f.scope} - {variable}))
        return self.around[variable]

    def run(self) -> None:
        self._singles()
        self._branches(sorted(self.alive))
        while self.alive:
            nodes = [v for v in sorted(self.alive) if len(self.neighbours(v)) <= 2]
            chosen = self._round(nodes) or self._smallest()
            crowd = self._crowd(chosen)
            if crowd:
                touched = {n for v in crowd for n in self._fix(v)}
            elif chosen:
                touched = {n for v in chosen for n in self.neighbours(v)}
                for v in chosen:
                    self._eliminate(v)
            else:
                touched = self._fix(min(self.alive, key=lambda v: (-len(self.neighbours(v)), self.sizes[v], v)))
            self._branches(sorted(touched & self.alive))

    def _singles(self) -> None:
        """Fixes what has one value and many neighbours: to eliminate it would join them all. A weight of an unrolled network is
        such a variable, in searches that give it one place."""
        for v in sorted(self.alive):
            if self.sizes[v] == 1 and len(self.neighbours(v)) > AROUND:
                self._fix(v)

    def _crowd(self, chosen: Iterable[int]) -> list[int]:
        """Variables of one value among the neighbours of one that has many: its elimination would give each of them an axis."""
        many = (self.neighbours(v) for v in chosen if len(self.neighbours(v)) > AROUND)
        return sorted({n for around in many for n in around if self.sizes[n] == 1})

    def _branches(self, variables: Iterable[int]) -> None:
        """Branch elimination, until no variable has a single neighbour: it costs no more than to look at the tables."""
        queue = deque(variables)
        while queue:
            v = queue.popleft()
            around = self.neighbours(v)
            if v in self.alive and len(around) <= 1:
                self._eliminate(v)
                queue.extend(around)

    def _round(self, nodes: list[int]) -> list[int]:
        """Variables to eliminate together: no two are neighbours, and none is dearer than a neighbour that could be.

        Equal eliminations are taken or left together, the cheapest first: so repeated segments stay equal, and a ring
        of equal segments is halved.
        """
        classes: dict[Eliminate, list[int]] = {}
        for v in nodes:
            classes.setdefault(self._signature(v), []).append(v)
        work = {v: self._entries(v) * self.sizes[v] for v in nodes}
        chosen: list[int] = []
        taken: set[int] = set()
        for members in sorted(classes.values(), key=lambda members: (work[members[0]], -len(members), members[0])):
            for v in members:
                around = self.neighbours(v)
                cheapest = all(work[v] <= work.get(n, work[v]) for n in around)
                if cheapest and self._entries(v) <= self.budget and not taken.intersection(around):
                    chosen.append(v)
                    taken.add(v)
        return chosen

    def _smallest(self) -> list[int]:
        """The variable whose elimination gives the smallest table, then adds the fewest edges, and others like it."""
        entries = {v: self._entries(v) for v in sorted(self.alive)}
        least = min(entries.values())
        if least > self.budget:
            return []
        best = min((v for v in entries if entries[v] == least), key=lambda v: (self._fill(v), v))
        chosen: list[int] = []
        for v in entries:
            alike = entries[v] == least and self._signature(v) == self._signature(best)
            if alike and not set(chosen).intersection(self.neighbours(v)):
                chosen.append(v)
        return chosen

    def _fill(self, variable: int) -> int:
        """Edges that its elimination adds: pairs of its neighbours that are none yet."""
        around = self.neighbours(variable)
        joined = sum(len(self.together(a).intersection(around)) for a in around)
        return (len(around) * (len(around) - 1) - joined) // 2

    def together(self, variable: int) -> frozenset[int]:
        """The neighbours, to look some up in."""
        if variable not in self.sets:
            self.sets[variable] = frozenset(self.neighbours(variable))
        return self.sets[variable]

    def _entries(self, variable: int) -> int:
        if variable not in self.counts:
            self.counts[variable] = prod(self.sizes[n] for n in self.neighbours(variable))
        return self.counts[variable]

    def _signature(self, variable: int) -> Eliminate:
        if variable not in self.signatures:
            inputs = self._inputs(variable)
            self.signatures[variable] = Eliminate(tuple((f.operation, labels) for f, labels in inputs))
            self.factored[variable] = tuple(f for f, _ in inputs)
        return self.signatures[variable]

    def _inputs(self, variable: int) -> list[tuple[Factor, tuple[int, ...]]]:
        label = {v: i for i, v in enumerate((variable, *self.neighbours(variable)))}
        labelled = [(f, tuple(label[v] for v in f.scope)) for f in self.at[variable]]
        return sorted(labelled, key=lambda pair: (pair[1], pair[0].operation))

    def _eliminate(self, variable: int) -> None:
        around = self.neighbours(variable)
        number = self._number(self._signature(variable), tuple(self.sizes[v] for v in around))
        factors = self.factored[variable]
        self._remove(variable)
        result = Factor(around, number)
        self._add(result)
        self.steps.append(Step(variable, factors, (result,)))

    def _fix(self, variable: int) -> set[int]:
        """Heuristic elimination; of the variable with the most neighbours, as TensorOpt does with an attention mask."""
        around = self.neighbours(variable)
        inputs = self._inputs(variable)
        choice = self._number(Choose(tuple((f.operation, labels) for f, labels in inputs)), ())
        self._remove(variable)
        results = []
        for f, _ in inputs:
            axis = f.scope.index(variable)
            scope = f.scope[:axis] + f.scope[axis + 1 :]
            number = self._number(Slice(f.operation, axis, choice), tuple(self.sizes[v] for v in scope))
            results.append(Factor(scope, number))
            self._add(results[-1])
        self.steps.append(Step(variable, tuple(f for f, _ in inputs), tuple(results), choice, self.sizes[variable] == 1))
        return set(around)
