"""Removal of sorting: rows that are sorted by label, multiplied in groups and moved back, are products of rows with labels.

A mixture of experts sorts its tokens by expert, multiplies each group of consecutive rows with the matrix of its expert
(`lax.ragged_dot`), and puts the results into the order of the tokens. Between, every operation treats rows alike: the result in
sorted order is that of the rows in their own order, sorted. So a walk through the program follows which values are *sorted rows* of
others, and adds for each the equation on rows in their own order. Where sorted rows are put back, or added up, that equation's
result takes their place, and nothing reads what was sorted any more.

This holds whatever the router chooses, drops no row, and leaves gradients as they are. A program in which something else reads
sorted rows stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from unity.pcg.capture.routing.integer_tables import IntegerTable, IntegerTables
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED, SCANNED
from unity.pcg.operators.kernel_primitive import KERNEL
from unity.pcg.operators.routed_product import FREE, routed_dot
from unity.pcg.operators.table.reduction import REDUCTIONS, WHOLE_REDUCTIONS
from unity.pcg.propagation.nested.derivative_rules import is_readable, jvp_body
from unity.pcg.propagation.nested.programs import nested_body
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import Factor, Slot

GROUPED = "ragged_dot_general"
DERIVED = "custom_jvp_call"


@dataclass(frozen=True)
class SortedRows:
    """A value whose rows are those of another value, sorted by their labels. All rows sorted by one variable are in one order.

    Attributes:
        labels: the variable with the label of each row.
        value: the value in the rows' own order.
    """

    labels: int
    value: Atom


def without_sorting(body: Body) -> Body:
    """Return a body whose products of sorted rows are products of rows in their own order, where nothing else reads sorted rows.

    Bodies of scans and remats in it, too. Returns the same object if it has none.
    """
    inside = tuple(map(_without_nested_sorting, body.equations))
    if any(a is not b for a, b in zip(inside, body.equations, strict=True)):
        body = replace(body, equations=inside)
    names = {e.name for e in body.equations}
    if GROUPED not in names or "sort" not in names:
        return body
    still_sorted = frozenset[int]()  # the labels whose rows stay sorted
    while True:
        walk = _Walk(body, still_sorted)
        result = used(walk.run())
        remaining = {v for e in result.equations if e.name == GROUPED for v in e.results}
        needed = frozenset(labels for v, labels in walk.products.items() if v in remaining)
        if not needed:
            return result if walk.products else body
        still_sorted |= needed


def _without_nested_sorting(e: Equation) -> Equation:
    if e.name not in SCANNED + REMATERIALIZED or not _has_groups(e):
        return e
    program = nested_body(e)
    result = without_sorting(program)
    return e if result is program else replace(e, params={**e.params, "jaxpr": result}, origin=None)


def _has_groups(e: Equation) -> bool:
    """Return whether the program nested in an equation, or one nested in that, has ragged products."""
    inside = nested_body(e).equations
    return any(inner.name == GROUPED or (inner.name in SCANNED + REMATERIALIZED and _has_groups(inner)) for inner in inside)


class _Walk:
    """One walk through a body.

    Attributes:
        rows: the variables that are sorted rows of others.
        places: the variables with the place of each row in sorted order, each with the labels.
        instead: the variables in whose place others are read.
        writer: the equations of the new program.
        types: a body that has the types of all variables, and no equations.
        alike: the variables whose rows are all equal.
        stable: whether the sorts by labels are stable, by the labels.
        products: the results of ragged products that are sorted rows of routed products, each with the labels.
    """

    def __init__(self, body: Body, kept: frozenset[int]) -> None:
        self.body, self.kept = body, kept
        self.writer = EquationWriter.beside(body)
        self.tensors = self.writer.tensors
        self.types = Body((), (), (), self.tensors)
        self.known = IntegerTables()
        self.rows: dict[int, SortedRows] = {}
        self.places: dict[int, int] = {}
        self.instead: dict[int, Atom] = {}
        self.products: dict[int, int] = {}
        self.alike: set[int] = set()
        self.stable: dict[int, bool] = {}

    def run(self) -> Body:
        """Return the body with the equations on rows in their own order."""
        for e in self.body.equations:
            if any(a in self.instead for a in e.operands if isinstance(a, int)):
                e = e.reading(tuple(map(self.current, e.operands)))
            self.add(e)
            if e.name == "sort":
                self.sort(e)
            elif any(a in self.rows for a in e.operands if isinstance(a, int)):
                self.follow(e)
            elif e.name in ("scatter-add", "scatter"):
                self.put(e)
        return Body(self.body.inputs, tuple(map(self.current, self.body.outputs)), tuple(self.writer.equations), self.tensors)

    def current(self, atom: Atom) -> Atom:
        """Return the atom that is read in the place of another."""
        return self.instead.get(atom, atom) if isinstance(atom, int) else atom

    def add(self, e: Equation) -> None:
        self.writer.equations.append(e)
        self.note(e)

    def note(self, e: Equation) -> None:
        """Note the integers that an equation computes, and equal rows."""
        self.known.note(self.types, e)
        self.alike.update(_alike(e))

    def emit(self, e: Equation, operands: Sequence[Atom]) -> tuple[int, ...]:
        """Add an equation like another, of other operands, and return its results."""
        results = tuple(self.writer.new(self.tensors[v]) for v in e.results)
        self.add(replace(e.reading(tuple(operands)), results=results))
        return results

    def compute(self, run: Callable[..., Any], operands: Sequence[Atom], like: Equation) -> Atom:
        """Add the equations of a function, at the place of another equation, and return its result."""
        count = len(self.writer.equations)
        (result,) = self.writer.trace(run, operands, like)
        for e in self.writer.equations[count:]:
            self.note(e)
        return result

    def table(self, atom: Atom) -> IntegerTable | None:
        return self.known.of(atom)

    def counts_from(self, atom: Atom, size: int, one_of: int = 1) -> bool:
        """Return whether each row i of a constant is `i // one_of`."""
        table = self.table(atom)
        return (
            table is not None
            and table.root is None
            and table.values.size == size
            and table.values.shape[:1] in ((), (size,))
            and bool(np.array_equal(table.flat, np.arange(size) // one_of))
        )

    def sort(self, e: Equation) -> None:
        """Follow a sort of labels, or one of the order that another sort returned, whose result is where each row went."""
        keys, *others = e.operands
        n = self.tensors[e.results[0]].shape
        if len(n) != 1 or e.params["num_keys"] != 1 or not isinstance(keys, int) or keys in self.kept:
            return
        sorted_order = self.rows.get(keys)
        if sorted_order is not None:
            if self.counts_from(sorted_order.value, n[0]):
                for v, a in zip(e.results[1:], others, strict=True):
                    if self.counts_from(a, n[0]):
                        self.place(v, sorted_order.labels)
            return
        labels = self.table(keys)
        if labels is None or labels.root is None or labels.rows != 1 or any(a in self.rows for a in others if isinstance(a, int)):
            return
        if keys in self.stable and not (e.params["is_stable"] and self.stable[keys]):
            return  # rows of equal labels may be in another order than by the first sort
        self.stable[keys] = e.params["is_stable"]
        self.rows.update((v, SortedRows(keys, a)) for v, a in zip(e.results, e.operands, strict=True))

    def place(self, variable: int, labels: int) -> None:
        """Note a variable as the place of each row in sorted order."""
        shape = self.tensors[variable].shape
        self.places[variable] = labels
        values = np.arange(shape[0], dtype=self.tensors[variable].dtype)
        self.known.tables[variable] = IntegerTable(values.reshape(-1, *(1,) * (len(shape) - 1)), variable, 1)

    def places_in(self, index: Atom) -> int | None:
        """Return the labels by which rows are sorted whose places an index is; None for any other index."""
        table = self.table(index)
        labels = None if table is None or table.root is None else self.places.get(table.root)
        return labels if table is not None and np.array_equal(table.flat, np.arange(table.flat.size)) else None

    def put(self, e: Equation) -> None:
        """Note zeros to which rows are added at their places as sorted rows."""
        into, index, updates = e.operands
        zeros, labels = self.table(into), self.places_in(index)
        same = self.tensors[e.results[0]] == self.types.tensor(updates)
        if labels is not None and same and _puts_rows(self.types, e) and zeros is not None and not np.any(zeros.values):
            self.rows[e.results[0]] = SortedRows(labels, updates)

    def follow(self, e: Equation) -> None:
        """Follow sorted rows through an equation."""
        sorted_operands = [self.rows[a] for a in e.operands if isinstance(a, int) and a in self.rows]
        if len({s.labels for s in sorted_operands}) > 1:
            return
        labels = sorted_operands[0].labels
        which = [isinstance(a, int) and a in self.rows for a in e.operands]
        operands = [self.rows[a].value if isinstance(a, int) and a in self.rows else a for a in e.operands]
        if e.name == "gather":
            self.gather(e, which, operands, labels)
        elif e.name in ("scatter-add", "scatter"):
            self.scatter(e, which, operands, labels)
        elif e.name == GROUPED:
            self.product(e, which, operands, labels)
        elif e.name in (*REDUCTIONS, *WHOLE_REDUCTIONS) and 0 in e.params["axes"]:  # in any order
            self.instead.update(zip(e.results, self.emit(e, operands), strict=True))
        elif _treats_rows_alike(self.types, e, self.rows, self.alike):
            results = self.emit(e, operands)
            self.rows.update((v, SortedRows(labels, r)) for v, r in zip(e.results, results, strict=True))

    def gather(self, e: Equation, which: Sequence[bool], operands: Sequence[Atom], labels: int) -> None:
        """Follow a look-up of sorted rows at their places, which is the rows in their own order, or one at sorted indices."""
        table, index = operands
        shape, numbers = self.types.tensor(table).shape, e.params["dimension_numbers"]
        whole_rows = _takes_rows(numbers, e.params["slice_sizes"], shape) and self.types.tensor(index).shape[1:] == (1,)
        n = self.types.tensor(index).shape[0]
        if which == [True, False]:
            if whole_rows and n == shape[0] and self.places_in(index) == labels:
                self.instead[e.results[0]] = table
        elif which == [False, True] and self.types.tensor(index).ndim == 2 and 0 not in numbers.offset_dims:
            if numbers.operand_batching_dims:
                return
            times = n // shape[0] if shape[0] and n % shape[0] == 0 else 0
            if whole_rows and times and self.counts_from(index, n, times):
                value = table if times == 1 else self.compute(lambda x: jnp.repeat(x, times, axis=0), [table], e)
            else:
                unsorted = replace(e, params={**e.params, "indices_are_sorted": False}, origin=None)
                (value,) = self.emit(unsorted, operands)
            self.rows[e.results[0]] = SortedRows(labels, value)

    def scatter(self, e: Equation, which: Sequence[bool], operands: Sequence[Atom], labels: int) -> None:
        """Follow a scatter of sorted rows at sorted indices: each row goes where it would in any order."""
        into, index, updates = operands
        shape, n = self.types.tensor(into).shape, self.types.tensor(index).shape[0]
        if which[0] or not which[1] or not _puts_rows(self.types, e):
            return
        if not (which[2] or updates in self.alike or e.name == "scatter"):
            return
        times = n // shape[0] if shape[0] and n % shape[0] == 0 else 0
        in_order = bool(times) and self.counts_from(index, n, times)
        if e.name == "scatter":
            if which[2] and times == 1 and in_order:
                self.instead[e.results[0]] = updates
            elif not which[2] and times == 1 and in_order and self.counts_from(updates, n):
                self.place(e.results[0], labels)  # the numbers of sorted places, each put where its row is
        elif in_order and which[2]:
            added = self.compute(lambda x, u: x + _sums(u, times), [into, updates], e)
            self.instead[e.results[0]] = added
        else:
            unsorted = replace(e, params={**e.params, "indices_are_sorted": False}, origin=None)
            self.instead.update(zip(e.results, self.emit(unsorted, operands), strict=True))

    def product(self, e: Equation, which: Sequence[bool], operands: Sequence[Atom], labels: int) -> None:
        """Follow a product of sorted rows in groups, if the groups are those of their labels."""
        numbers, sizes = e.params["ragged_dot_dimension_numbers"], operands[2]
        counts = self.known.counts.get(sizes) if isinstance(sizes, int) else None
        table = self.table(labels)
        if which[2] or counts is None or table is None or counts.root != table.root or e.params.get("group_offset") is not None:
            return
        count, rows = counts.weights.shape[1], self.tensors[labels].shape[:1]
        if not _are_labels(table) or prod(self.tensors[counts.root].shape) != rows[0]:
            return
        if any(self.types.tensor(a).shape[:1] != rows for a, is_sorted in zip(operands, which, strict=True) if is_sorted):
            return
        if not np.array_equal(counts.weights, table.flat[:, None] == np.arange(count)):
            return
        dense = tuple(tuple(map(tuple, pair)) for pair in numbers.dot_dimension_numbers)
        ragged, groups = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
        options = {"precision": e.params["precision"], "preferred_element_type": e.params["preferred_element_type"]}
        x, y, _ = operands
        beyond = bool(np.any(table.flat >= count))  # perhaps too large for int32

        def own(labels: Any) -> Any:
            return jnp.minimum(labels, jnp.asarray(count, labels.dtype)) if beyond else labels

        if which[0] and not which[1] and ragged == groups == (0,) and self.types.tensor(x).ndim == 2 and dense[1] == ((), ()):
            if dense[0] not in (((1,), (1,)), ((1,), (2,))):
                return

            def run(x: Any, y: Any, labels: Any) -> Any:
                y = y if dense[0] == FREE.dot_dimension_numbers[0] else lax.transpose(y, (0, 2, 1))
                return routed_dot(x, y, own(labels), count, **options)

            value = self.compute(run, [x, y, labels], e)
            self.rows[e.results[0]] = SortedRows(labels, value)
        elif which[0] and which[1] and ragged == (0,) and dense == (((0,), (0,)), ((), ())):
            if self.types.tensor(x).ndim != 2 or self.types.tensor(y).ndim != 2:
                return
            value = self.compute(lambda x, y, i: routed_dot(x, y, own(i), count, True, **options), [x, y, labels], e)
            self.instead[e.results[0]] = value
        else:
            return
        self.products[e.results[0]] = labels


def _are_labels(table: IntegerTable) -> bool:
    """Return whether the values are integers from 0, which sort as their groups do."""
    return table.values.dtype.kind in "iub" and not np.any(table.values < 0)


def _sums(rows: Any, times: int) -> Any:
    """Return the sums of each `times` consecutive rows."""
    return rows if times == 1 else rows.reshape(-1, times, *rows.shape[1:]).sum(1, dtype=rows.dtype)


def _takes_rows(numbers: Any, sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a gather takes whole rows of a table, by the index of the row."""
    return (
        tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.offset_dims) == tuple(range(1, len(shape)))
        and not numbers.operand_batching_dims
        and tuple(sizes[1:]) == tuple(shape[1:])
    )


def _puts_rows(body: Body, e: Equation) -> bool:
    """Return whether a scatter puts whole rows into an array, by the index of the row."""
    into, index, updates = (body.tensor(a) for a in e.operands)
    numbers = e.params["dimension_numbers"]
    return (
        tuple(numbers.inserted_window_dims) == tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and tuple(numbers.update_window_dims) == tuple(range(1, updates.ndim))
        and not numbers.operand_batching_dims
        and updates.shape[1:] == into.shape[1:]
        and index.shape[1:] == (1,)
    )


def _alike(e: Equation) -> Sequence[int]:
    """Return the results of an equation whose rows are all equal, as its operands are spread along them."""
    return e.results if e.name == "broadcast_in_dim" and 0 not in e.params["broadcast_dimensions"] else ()


def _treats_rows_alike(body: Body, e: Equation, rows: Container[Atom], alike: Container[Atom]) -> bool:
    """Return whether each row of the results is one function of the same row of operands, wherever it is.

    Args:
        body: the types of variables.
        e: the equation, with an operand among `rows`.
        rows: the variables with rows in some order.
        alike: the other variables whose rows are all equal.
    """
    which = [a in rows for a in e.operands]
    if e.name == DERIVED:
        return all(which) and is_readable(e) and _is_rowwise(nested_body(e)) and _is_rowwise(jvp_body(e).body)
    spec = None if e.name == KERNEL else spec_of(body, e)  # a kernel may count its rows
    if spec is None:
        return False
    n = next(body.tensor(a).shape[0] for a in e.operands if a in rows)
    if any(body.tensors[v].shape[:1] != (n,) for v in e.results):
        return False  # a reshape may take rows apart

    def is_along_rows(factor: Factor) -> bool:
        if factor.size != n or factor.reduction or factor.halo is not None or any(p != Slot(0) for p in factor.results):
            return False
        places = zip(factor.operands, e.operands, which, strict=True)
        return all(p == Slot(0) if is_sorted else p is None or (p == Slot(0) and a in alike) for p, a, is_sorted in places)

    return any(map(is_along_rows, spec.factors))


def _is_rowwise(body: Body) -> bool:
    """Return whether each row of a program's results is one function of the same row of its inputs."""
    rows, alike = set[Atom](body.inputs), set[Atom]()
    for e in body.equations:
        alike.update(_alike(e))
        if any(a in rows for a in e.operands):
            if not _treats_rows_alike(body, e, rows, alike):
                return False
            rows.update(e.results)
    return all(a in rows for a in body.outputs)
