"""The graphs of an enumeration as columns of numbers: each applies an operator to at most two others. No terms are built."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from unity.substitutions.generator.family import Family
from unity.substitutions.language.term import Apply, Term, Variable
from unity.substitutions.language.vocabulary import VOCABULARY

Array = np.ndarray


@dataclass(frozen=True)
class GraphGroup:
    """Graphs of one type and one number of operators. Row k of every column describes one graph."""

    numbers: Array  # [n]
    orders: Array  # [n]: the variables in order of appearance, an index into VariableOrders
    nodes: Array  # [n, most operators]: the numbers of the graph's operators, padded with -1
    joined: Array  # [n]: whether a concatenation is among them
    kernel: Array  # [n]: whether the graph is a weight of convolutions
    values: Array  # [*devices, n, *local]

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass
class VariableOrders:
    """Numbered sequences of variables by first appearance."""

    family: Family
    sequences: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    index: dict[tuple[int, ...], int] = field(default_factory=lambda: {(): 0})
    joined: dict[tuple[int, int], int] = field(default_factory=dict)

    def number(self, sequence: tuple[int, ...]) -> int:
        """Return the number of a sequence."""
        if sequence not in self.index:
            self.index[sequence] = len(self.sequences)
            self.sequences.append(sequence)
        return self.index[sequence]

    def join(self, first: Array, second: Array) -> Array:
        """Return the sequences of graphs whose operands have these sequences; -1 where those are too many variables."""
        pairs, inverse = np.unique(np.stack([first, second]), axis=1, return_inverse=True)
        joined = np.array([self._join(int(a), int(b)) for a, b in pairs.T], np.int64)
        return joined[inverse.reshape(-1)]

    def _join(self, a: int, b: int) -> int:
        if (a, b) not in self.joined:
            sequence = tuple(dict.fromkeys(self.sequences[a] + self.sequences[b]))
            self.joined[a, b] = self.number(sequence) if len(sequence) <= self.family.variables else -1
        return self.joined[a, b]

    def canonical(self, numbers: Array) -> Array:
        """Return whether the variables of each type appear in order, as they do in exactly one renaming of a graph."""
        starts = np.cumsum([0, *(leaf.count for leaf in self.family.leaves)])
        canonical = np.zeros(len(self.sequences), bool)
        for k, sequence in enumerate(self.sequences):
            groups = [[v for v in sequence if a <= v < b] for a, b in pairwise(starts)]
            canonical[k] = all(g == list(range(a, a + len(g))) for g, a in zip(groups, starts, strict=False))
        return canonical[numbers]


@dataclass
class Graphs:
    """The representatives of all classes, by number: variables first, then one graph for each value. Append only."""

    family: Family
    instance: list[int] = field(default_factory=list)  # -1: a variable
    left: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    result: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.instance)

    def extend(self, rows: Array) -> Array:
        """Add rows of (instance, left, right, result), and return their numbers."""
        start = len(self)
        for column, values in zip((self.instance, self.left, self.right, self.result), rows.T, strict=True):
            column.extend(values.tolist())
        return np.arange(start, len(self))

    def term(self, number: int) -> Term:
        """Return a graph as a term. Variables are named by their numbers."""
        if self.instance[number] < 0:
            return Variable(str(number))
        return self.apply(self.instance[number], self.left[number], self.right[number], self.result[number])

    def apply(self, instance: int, left: int, right: int, result: int) -> Apply:
        """Return the term of a row that has no number."""
        name, attributes = self.family.instances[instance]
        operands = (left, right)[: VOCABULARY[name].operands]
        return Apply(name, attributes, tuple(map(self.term, operands)), result)


def shared(first: Array, second: Array) -> Array:
    """Count the operators that pairs of graphs have in common, `[n, k]` and `[n, k]` to `[n]`."""
    same = (first[:, :, None] == second[:, None, :]) & (first[:, :, None] >= 0)
    return same.sum((1, 2))


def union(first: Array, second: Array, own: Array) -> Array:
    """Return the operators of two graphs and one more, sorted, with -1 in front, in the same width."""
    width = first.shape[1]
    both = np.sort(np.concatenate([first, second], 1), 1)
    both[:, 1:][both[:, 1:] == both[:, :-1]] = -1
    return np.concatenate([np.sort(both, 1)[:, 1 - width :] if width > 1 else both[:, :0], own[:, None]], 1)
