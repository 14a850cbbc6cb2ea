"""The graphs of one enumeration, as columns of numbers: a graph is made of at most two others, so no term need be built."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from unity.substitutions.generator.family import Family
from unity.substitutions.language.term import Apply, Term, Variable
from unity.substitutions.language.vocabulary import VOCABULARY

Array = np.ndarray


@dataclass(frozen=True)
class Group:
    """Graphs of one type and one number of operators. Row k is a graph: its number, its variables, its operators, its value."""

    numbers: Array  # [n]
    orders: Array  # [n]: which variables, in order of appearance (an index into Orders)
    nodes: Array  # [n, most operators]: the numbers of the operators in it, -1 where there are fewer
    joined: Array  # [n]: whether something was concatenated
    kernel: Array  # [n]: whether it is a weight of convolutions
    values: Array  # [*devices, n, *local]

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass
class Orders:
    """Sequences of variables by first appearance, numbered; and what joining two gives."""

    family: Family
    sequences: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    index: dict[tuple[int, ...], int] = field(default_factory=lambda: {(): 0})
    joined: dict[tuple[int, int], int] = field(default_factory=dict)

    def number(self, sequence: tuple[int, ...]) -> int:
        if sequence not in self.index:
            self.index[sequence] = len(self.sequences)
            self.sequences.append(sequence)
        return self.index[sequence]

    def join(self, first: Array, second: Array) -> Array:
        """The sequence of a graph whose operands have these. -1 where there are too many variables."""
        pairs, inverse = np.unique(np.stack([first, second]), axis=1, return_inverse=True)
        found = np.array([self._join(int(a), int(b)) for a, b in pairs.T], np.int64)
        return found[inverse.reshape(-1)]

    def _join(self, a: int, b: int) -> int:
        if (a, b) not in self.joined:
            sequence = tuple(dict.fromkeys(self.sequences[a] + self.sequences[b]))
            self.joined[a, b] = self.number(sequence) if len(sequence) <= self.family.variables else -1
        return self.joined[a, b]

    def canonical(self, numbers: Array) -> Array:
        """Whether the variables of each type appear in their own order: one of all renamings of a graph does."""
        starts = np.cumsum([0, *(leaf.count for leaf in self.family.leaves)])
        found = np.zeros(len(self.sequences), bool)
        for k, sequence in enumerate(self.sequences):
            groups = [[v for v in sequence if a <= v < b] for a, b in pairwise(starts)]
            found[k] = all(g == list(range(a, a + len(g))) for g, a in zip(groups, starts, strict=False))
        return found[numbers]


@dataclass
class Graphs:
    """All graphs kept, by number: variables first, then one for each value found. Append only."""

    family: Family
    instance: list[int] = field(default_factory=list)  # -1: a variable
    left: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    result: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.instance)

    def extend(self, rows: Array) -> Array:
        """Adds rows of (instance, left, right, result); their numbers."""
        start = len(self)
        for column, values in zip((self.instance, self.left, self.right, self.result), rows.T, strict=True):
            column.extend(values.tolist())
        return np.arange(start, len(self))

    def term(self, number: int) -> Term:
        """A graph as a term. Variables are named by their numbers."""
        if self.instance[number] < 0:
            return Variable(str(number))
        return self.apply(self.instance[number], self.left[number], self.right[number], self.result[number])

    def apply(self, instance: int, left: int, right: int, result: int) -> Apply:
        """The term of a row that is not kept itself."""
        name, attributes = self.family.instances[instance]
        operands = (left, right)[: VOCABULARY[name].operands]
        return Apply(name, attributes, tuple(map(self.term, operands)), result)


def shared(first: Array, second: Array) -> Array:
    """How many operators two graphs have in common. `[n, k]` and `[n, k]` to `[n]`."""
    same = (first[:, :, None] == second[:, None, :]) & (first[:, :, None] >= 0)
    return same.sum((1, 2))


def union(first: Array, second: Array, own: Array) -> Array:
    """The operators of two graphs together and one more. Sorted, padded by -1 in front; as wide as they are."""
    width = first.shape[1]
    both = np.sort(np.concatenate([first, second], 1), 1)
    both[:, 1:][both[:, 1:] == both[:, :-1]] = -1
    return np.concatenate([np.sort(both, 1)[:, 1 - width :] if width > 1 else both[:, :0], own[:, None]], 1)
