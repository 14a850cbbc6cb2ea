"""Enumeration of all well-typed graphs up to a size, modulo equality (TASO section 3, with classes instead of pairs).

Graphs grow by one operator at a time, from one representative of each class of equal graphs; the same operator on another member
of the class follows from that member's rule, by congruence. So the rules connect all equal graphs, although only a small part of
the graphs is ever built. A class is a type and a fingerprint: two random linear forms of the whole value, over a prime field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from unity.base.errors import IllTypedError
from unity.substitutions.generator.family import Family, Instance
from unity.substitutions.generator.graph_columns import Array, GraphGroup, Graphs, VariableOrders, shared, union
from unity.substitutions.language.term import Apply, Term, applications
from unity.substitutions.language.typecheck import TensorType, result_types
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.semantics.domains import Modular
from unity.verify.semantics.meaning import apply, random_pieces
from unity.verify.semantics.pieces import join

PRIME = 2**31 - 1
CHUNK = 1 << 16


@dataclass(frozen=True)
class CandidateGraphs:
    """Unclassified graphs of one type: rows of (instance, left, right, result), and the columns of a `GraphGroup`."""

    rows: Array
    orders: Array
    nodes: Array
    joined: Array
    kernel: Array
    prints: Array
    values: Array | None

    @staticmethod
    def concatenate(parts: list[CandidateGraphs], axes: int) -> CandidateGraphs:
        """Return the graphs of several parts."""
        values = None if parts[0].values is None else np.concatenate([p.values for p in parts], axes)  # type: ignore[misc]

        def column(name: str) -> Array:
            return np.concatenate([getattr(p, name) for p in parts])

        return CandidateGraphs(*map(column, ("rows", "orders", "nodes", "joined", "kernel", "prints")), values=values)


@dataclass(frozen=True)
class EqualGraphs:
    """Two graphs of one type that compute the same. `known` has the fewer operators, or was enumerated first."""

    new: tuple[Term, ...]
    known: tuple[Term, ...]
    operators: int


def _is_on_joined(term: Term) -> bool:
    """Return whether a term is one operator on variables and on concatenations of two variables."""
    if not isinstance(term, Apply):
        return False
    inner = [x for x in term.operands if isinstance(x, Apply)]
    return all(x.operator == "concat" and not any(isinstance(y, Apply) for y in x.operands) for x in inner)


class Enumeration:
    """The enumeration of a family. `levels` yields, for each number of operators, the graphs that are equal to earlier ones."""

    def __init__(self, family: Family, seed: int = 0) -> None:
        self.family, self.domain = family, Modular()
        self.rng = np.random.default_rng(seed)
        self.graphs, self.orders = Graphs(family), VariableOrders(family)
        self.groups: dict[tuple[TensorType, int], GraphGroup] = {}
        self.known: dict[TensorType, tuple[Array, Array]] = {}  # sorted fingerprints, and the numbers of their graphs
        self.weights: dict[int, Array] = {}
        self.commuting: set[int] = set()
        self.order_of = np.empty(0, np.int64)  # of every representative, its index into VariableOrders
        self.result_classes: dict[tuple[int, int], dict[int, int]] = {}  # by (instance, operand): the class of each result
        self.built = 0
        self._add_leaves()

    def _add_leaves(self) -> None:
        width, devices = self.family.operators + 1, len(self.family.axes)
        for leaf in self.family.leaves:
            numbers = self.graphs.extend(np.array([[-1, -1, -1, 0]] * leaf.count))
            orders = np.array([self.orders.number((int(n),)) for n in numbers])
            self.order_of = np.concatenate([self.order_of, orders])
            values = random_pieces(leaf.type, self.family.axes, self.domain, self.rng, leaf.count)
            nodes = np.full((leaf.count, width), -1)
            joined, kernel = np.zeros(leaf.count, bool), np.full(leaf.count, leaf.kernel)
            self.groups[leaf.type, 0] = GraphGroup(numbers, orders, nodes, joined, kernel, values)
            prints = self._fingerprint(leaf.type, values)
            order = np.argsort(prints)
            self.known[leaf.type] = (prints[order], numbers[order])
            assert values.shape[devices] == leaf.count

    def _fingerprint(self, type_: TensorType, values: Array) -> Array:
        """Return fingerprints `[n]` of values `[*devices, n, *local]`, with partial sums reduced."""
        whole = join(values, type_.shape, type_.states, self.family.axes, self.domain)
        flat = whole.reshape(len(whole), -1).astype(np.int64) % PRIME
        if flat.shape[1] not in self.weights:
            self.weights[flat.shape[1]] = np.random.default_rng(flat.shape[1]).integers(1, PRIME, (2, flat.shape[1]))
        first, second = ((flat * w % PRIME).sum(1) % PRIME for w in self.weights[flat.shape[1]])
        return first * (1 << 31) + second

    def levels(self) -> Iterator[list[EqualGraphs]]:
        """Yield, for one operator, two, and so on, the graphs that equal earlier ones.

        The last level has only operators with two results, on the largest graphs: there one graph does the work of two.
        """
        several = {k for k, (name, _) in enumerate(self.family.instances) if VOCABULARY[name].results > 1}
        last = self.family.operators + bool(several)
        for size in range(1, last + 1):
            built: dict[TensorType, list[CandidateGraphs]] = {}
            for number, instance in enumerate(self.family.instances):
                if size > self.family.operators and number not in several:
                    continue
                for type_, graphs in self._applications(number, instance, size, keep=size < last):
                    built.setdefault(type_, []).append(graphs)
            if size == 1:
                self._find_commuting(built)
            self.result_classes = {}
            equal: list[EqualGraphs] = []
            for type_, parts in built.items():
                equal += self._classify(type_, CandidateGraphs.concatenate(parts, len(self.family.axes)), size)
            yield (equal if size <= self.family.operators else []) + self._pairs_of_results(size)

    def _pairs_of_results(self, size: int) -> list[EqualGraphs]:
        """Return operators whose two results both equal earlier graphs: rules of two outputs.

        Only around one operator on concatenated tensors: around several, several steps do the same.
        """
        equal = []
        for (instance, operand), numbers in self.result_classes.items():
            new = [self.graphs.apply(instance, operand, -1, result) for result in (0, 1)]
            if len(numbers) < 2:
                continue
            known = [self.graphs.term(numbers[result]) for result in (0, 1)]
            (whole,) = new[0].operands
            if _is_on_joined(whole) and all(t.operator != new[0].operator for t in applications(known)):
                equal.append(EqualGraphs(tuple(new), tuple(known), size))
        return equal

    def _applications(self, number: int, instance: Instance, size: int, keep: bool) -> Iterator[tuple[TensorType, CandidateGraphs]]:
        """Yield all applications of an instance that have `size` operators. `keep`: with the values that larger graphs need."""
        groups = list(self.groups.items())
        for (left_type, left_size), left in groups:
            if VOCABULARY[instance[0]].operands == 1:
                if left_size == size - 1:
                    every = np.arange(len(left))
                    yield from self._apply(number, (left_type,), left, None, every, every, keep)
                continue
            for (right_type, right_size), right in groups:
                if left_size < size and right_size < size <= left_size + right_size + 1:
                    for i, j in self._pairs(left, right, size, number in self.commuting):
                        yield from self._apply(number, (left_type, right_type), left, right, i, j, keep)

    def _pairs(self, left: GraphGroup, right: GraphGroup, size: int, commuting: bool) -> Iterator[tuple[Array, Array]]:
        """Yield pairs of graphs that have `size - 1` operators together, and not too many variables."""
        step = max(1, CHUNK // max(1, len(right)))
        for start in range(0, len(left), step):
            rows = np.arange(start, min(start + step, len(left)))
            i, j = (x.reshape(-1) for x in np.meshgrid(rows, np.arange(len(right)), indexing="ij"))
            if commuting:
                ordered = left.numbers[i] <= right.numbers[j]
                i, j = i[ordered], j[ordered]
            together = (left.nodes[i] >= 0).sum(1) + (right.nodes[j] >= 0).sum(1) - shared(left.nodes[i], right.nodes[j])
            fitting = together == size - 1
            i, j = i[fitting], j[fitting]
            if len(i):
                fitting = self.orders.join(left.orders[i], right.orders[j]) >= 0
                i, j = i[fitting], j[fitting]
            if len(i):
                yield i, j

    def _apply(
        self, number: int, types: tuple[TensorType, ...], left: GraphGroup, right: GraphGroup | None, i: Array, j: Array, keep: bool
    ) -> Iterator[tuple[TensorType, CandidateGraphs]]:
        """Apply an instance to some graphs of two groups."""
        name, attributes = self.family.instances[number]
        axes = self.family.axes
        try:
            results = result_types(name, attributes, types, axes)
        except IllTypedError:
            return
        sensible = self._is_sensible(name, left, right, i, j)
        i, j = i[sensible], j[sensible]
        if not len(i):
            return
        operands = [left.values.take(i, len(axes))] + ([right.values.take(j, len(axes))] if right else [])
        values = apply(name, attributes, types, operands, axes, self.domain, 1)
        own = self.built + np.arange(len(i))  # both results of an operator have its number
        self.built += len(i)
        other = right or left
        second = other.numbers[j] if right else np.full(len(i), -1)
        nodes = union(left.nodes[i], other.nodes[j] if right else np.full_like(left.nodes[i], -1), own)
        orders = self.orders.join(left.orders[i], other.orders[j] if right else np.zeros_like(i))
        kernel = left.kernel[i] & (name != "conv2d") | (name in ("identity_kernel", "mean_kernel"))
        joined = left.joined[i] | other.joined[j] | (name == "concat")
        for result, (type_, value) in enumerate(zip(results, values, strict=True)):
            rows = np.stack([np.full(len(i), number), left.numbers[i], second, np.full(len(i), result)], 1)
            yield (
                type_,
                CandidateGraphs(rows, orders, nodes, joined, kernel, self._fingerprint(type_, value), value if keep else None),
            )

    def _is_sensible(self, name: str, left: GraphGroup, right: GraphGroup | None, i: Array, j: Array) -> Array:
        """Return which applications to build: only concatenated tensors are split, kernels are only weights of convolutions."""
        if name == "split" and not self.family.halves:
            return left.joined[i]
        if name in ("maxpool", "avgpool"):
            return ~left.kernel[i]
        if right is None:
            return np.ones(len(i), bool)
        if name == "conv2d":
            return ~left.kernel[i] & right.kernel[j]
        return left.kernel[i] == right.kernel[j]

    def _find_commuting(self, built: dict[TensorType, list[CandidateGraphs]]) -> None:
        """Find the commutative operators at the first level, so that later levels try only one order of their operands."""
        for number, (name, _) in enumerate(self.family.instances):
            rows = [(r, p) for parts in built.values() for part in parts for r, p in zip(part.rows, part.prints, strict=True)]
            prints = {(int(r[1]), int(r[2])): p for r, p in rows if r[0] == number}
            both = [(a, b) for a, b in prints if a < b and (b, a) in prints]
            if VOCABULARY[name].operands == 2 and both and all(prints[a, b] == prints[b, a] for a, b in both):
                self.commuting.add(number)

    def _record_result_classes(self, graphs: CandidateGraphs, numbers: Array) -> None:
        """Record the classes of the results of operators with two results."""
        several = [k for k, (name, _) in enumerate(self.family.instances) if VOCABULARY[name].results > 1]
        for k in np.flatnonzero(np.isin(graphs.rows[:, 0], several) & self.orders.canonical(graphs.orders) & (numbers >= 0)):
            instance, operand, _, result = map(int, graphs.rows[k])
            self.result_classes.setdefault((instance, operand), {})[result] = int(numbers[k])

    def _classify(self, type_: TensorType, graphs: CandidateGraphs, size: int) -> list[EqualGraphs]:
        """Make the first graph of every new class its representative, and return the others with theirs."""
        prints, numbers = self.known.get(type_, (np.empty(0, np.int64), np.empty(0, np.int64)))
        unique, first, inverse = np.unique(graphs.prints, return_index=True, return_inverse=True)
        at = np.searchsorted(prints, unique).clip(max=max(len(prints) - 1, 0))
        old = prints[at] == unique if len(prints) else np.zeros(len(unique), bool)
        fresh = ~old & (unique != 0)
        order = np.argsort(first[fresh])
        representatives = first[fresh][order]
        added = self.graphs.extend(graphs.rows[representatives])
        number_of = np.full(len(unique), -1)
        number_of[old] = numbers[at[old]]
        number_of[np.flatnonzero(fresh)[order]] = added
        self.order_of = np.concatenate([self.order_of, graphs.orders[representatives]])
        if graphs.values is not None and len(representatives):
            values = graphs.values.take(representatives, len(self.family.axes))
            columns = [column[representatives] for column in (graphs.orders, graphs.nodes, graphs.joined, graphs.kernel)]
            self.groups[type_, size] = GraphGroup(added, *columns, values=values)
        merged = np.concatenate([prints, unique[fresh]]), np.concatenate([numbers, number_of[fresh]])
        order = np.argsort(merged[0])
        self.known[type_] = (merged[0][order], merged[1][order])
        self._record_result_classes(graphs, number_of[inverse])
        canonical = self.orders.canonical(graphs.orders) | self.orders.canonical(self.order_of[number_of[inverse]])
        others = (graphs.prints != 0) & canonical
        others[representatives] = False
        return [
            EqualGraphs((self.graphs.apply(*map(int, graphs.rows[k])),), (self.graphs.term(int(number_of[inverse[k]])),), size)
            for k in np.flatnonzero(others)
        ]
