"""Integers of a program that are known: constants, and functions of labels, by their value for every label.

A label is an integer of a small range, such as the expert of a token: the index that `top_k` or `argmax` returns. A function of it
is a table with one entry for each label. So an index that is corrected for negative numbers is recognized as the label itself, and
a scatter of ones, or a sum of one-hot rows, as the number of rows with each label, however they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from unity.pcg.ir.program import Atom, Body, Equation, Tensor, params_key
from unity.pcg.types.parallel_type import Shape

LONGEST, LARGEST = 1 << 26, 1 << 20  # elements of a table of one dimension, and of several
FUNCTIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "sign": np.sign, "abs": np.abs,
    "max": np.maximum, "min": np.minimum, "rem": np.fmod,
    "div": lambda x, y: (x - np.fmod(x, y)) // y,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: np.where(which, cases[-1], cases[0]),
    "stop_gradient": lambda x: x, "copy": lambda x: x, "copy_p": lambda x: x,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class IntegerTable:
    """The values of a variable, of its number of dimensions; one of size one stands for any size.

    Attributes:
        values: the values. Along the first dimension of rows they are those for label 0, 1, ...
        root: the variable with the labels; None for a constant.
        rows: the number of leading dimensions over which the labels range. All but the first have size one in `values`.
    """

    values: np.ndarray
    root: int | None = None
    rows: int = 0

    @property
    def flat(self) -> np.ndarray:
        """The values in one dimension."""
        return self.values.reshape(-1)


@dataclass(frozen=True, eq=False)
class RowCounts:
    """Numbers of rows: entry e counts each row with label v `weights[v, e]` times.

    Attributes:
        weights: an array [labels, entries].
        root: the variable with the labels.
    """

    weights: np.ndarray
    root: int


class IntegerTables:
    """The known integers of a program whose equations are noted one by one.

    Attributes:
        tables: the variables that are constants, or functions of labels.
        counts: the variables that are numbers of rows.
    """

    def __init__(self) -> None:
        self.tables: dict[int, IntegerTable] = {}
        self.counts: dict[int, RowCounts] = {}
        self._constants: dict[tuple, IntegerTable | None] = {}  # equal layers share theirs

    def of(self, atom: Atom) -> IntegerTable | None:
        """Return the table of an atom, if its values are known."""
        if isinstance(atom, int):
            return self.tables.get(atom)
        if not _is_number(atom.tensor.dtype):
            return None
        key = "literal", atom.key  # not its id, which that of another may equal later
        if key not in self._constants:
            values = _exactly(np.asarray(atom.value), atom.tensor.dtype)
            self._constants[key] = None if values is None else IntegerTable(values)
        return self._constants[key]

    def note(self, body: Body, e: Equation) -> None:
        """Note the results of an equation. `body`: a program that has the types of its operands and results."""
        if e.name in ("top_k", "argmax", "argmin"):
            self._note_labels(body, e)
            return
        if len(e.results) != 1:
            return
        (v,) = e.results
        if e.name in ("scatter-add", "reduce_sum"):
            counts = self._scattered(body, e) if e.name == "scatter-add" else self._summed(body, e)
            if counts is not None and _counts_exactly(body.tensors[v].dtype, prod(body.tensors[counts.root].shape)):
                self.counts[v] = counts
            return
        if e.name == "convert_element_type" and e.operands[0] in self.counts:
            counts = self.counts[e.operands[0]]  # type: ignore[index]
            if _counts_exactly(body.tensors[v].dtype, prod(body.tensors[counts.root].shape)):
                self.counts[v] = counts
            return
        table = self._iota(body, e) if e.name == "iota" else self._computed(body, e)
        if table is not None:
            self.tables[v] = table

    def _note_labels(self, body: Body, e: Equation) -> None:
        operand, v = body.tensor(e.operands[0]), e.results[-1]
        axis = e.params["axes"][0] if "axes" in e.params else e.params.get("axis", -1)
        shape = body.tensors[v].shape
        count = operand.shape[axis]
        if shape and count < 1 << 16 and _counts_exactly(body.tensors[v].dtype, count):
            labels = np.arange(count, dtype=body.tensors[v].dtype)
            self.tables[v] = IntegerTable(labels.reshape(-1, *(1,) * (len(shape) - 1)), v, len(shape))

    def _iota(self, body: Body, e: Equation) -> IntegerTable | None:
        shape, dim, dtype = body.tensors[e.results[0]].shape, e.params["dimension"], body.tensors[e.results[0]].dtype
        if not _is_number(dtype) or shape[dim] > LONGEST or not _counts_exactly(dtype, shape[dim]):
            return None
        key = "iota", shape[dim], dim, len(shape), str(dtype)
        if key not in self._constants:
            sizes = [shape[dim] if d == dim else 1 for d in range(len(shape))]
            self._constants[key] = IntegerTable(np.arange(shape[dim], dtype=dtype).reshape(sizes))
        return self._constants[key]

    def _computed(self, body: Body, e: Equation) -> IntegerTable | None:
        """Return the table of the result of an elementwise equation, or of one that changes a shape, of known operands."""
        known = [self.of(a) for a in e.operands]
        operands = [t for t in known if t is not None]
        if not operands or len(operands) < len(known):
            return None
        roots = {(t.root, t.rows) for t in operands if t.root is not None}
        if len(roots) > 1:
            return None
        root, rows = next(iter(roots), (None, 0))
        result, tensor = IntegerTable(np.empty(0), root, rows), body.tensors[e.results[0]]
        if not _is_number(tensor.dtype):
            return None
        if root is None:
            key = e.name, params_key(e.params), str(tensor), *(t.values.item() if t.values.size == 1 else id(t) for t in operands)
            if key not in self._constants:
                self._constants[key] = self._values(body, e, operands, result)
            return self._constants[key]
        return self._values(body, e, operands, result)

    def _values(self, body: Body, e: Equation, operands: Sequence[IntegerTable], result: IntegerTable) -> IntegerTable | None:
        first, rows, (shape, dtype) = operands[0], result.rows, _type(body.tensors[e.results[0]])
        if e.name == "broadcast_in_dim":
            dims = e.params["broadcast_dimensions"]
            if tuple(dims[:rows]) != tuple(range(rows)) or shape[:rows] != body.tensor(e.operands[0]).shape[:rows]:
                return None  # repeated rows would be counted once
            sizes = dict(zip(dims, first.values.shape, strict=True))
            return replace(result, values=first.values.reshape([sizes.get(d, 1) for d in range(len(shape))]))
        if e.name in ("reshape", "squeeze", "expand_dims"):
            return _reshaped(first, body.tensor(e.operands[0]).shape, shape)
        if any(t.root is None and any(n > 1 for n in t.values.shape[:rows]) for t in operands):
            return None  # it differs between rows of one label
        sizes = np.broadcast_shapes(*(t.values.shape for t in operands))
        if prod(sizes) > (LONGEST if prod(sizes) == max(sizes, default=1) else LARGEST):
            return None
        values = [t.values for t in operands]
        if e.name == "convert_element_type":
            out = _converted(values[0], dtype)
        else:
            undefined = (e.name in ("div", "rem") and not np.all(values[1])) or (e.name == "select_n" and values[0].dtype != bool)
            fractional = e.name == "div" and np.dtype(dtype).kind not in "iu"
            if undefined or fractional or e.name not in FUNCTIONS:
                return None
            with np.errstate(all="ignore"):  # integers wrap around, as in XLA
                out = _exactly(np.asarray(FUNCTIONS[e.name](*values)), dtype)
        return None if out is None else replace(result, values=out)

    def _scattered(self, body: Body, e: Equation) -> RowCounts | None:
        """Return the counts that a scatter of ones, added to zeros at labels, is."""
        zeros, index, ones = map(self.of, e.operands)
        if zeros is None or index is None or ones is None or index.root is None or np.any(zeros.values) or np.any(ones.values != 1):
            return None
        numbers, entries = e.params["dimension_numbers"], body.tensors[e.results[0]].shape
        batched = numbers.operand_batching_dims or numbers.update_window_dims
        if len(entries) != 1 or batched or body.tensor(e.operands[1]).shape[index.rows :] != (1,):
            return None
        outside = np.any((index.flat < 0) | (index.flat >= entries[0]))
        if outside and GatherScatterMode.from_any(e.params["mode"]) != GatherScatterMode.FILL_OR_DROP:
            return None  # clamped indices count for the first or last entry
        if index.values.size * entries[0] > LARGEST:
            return None
        return RowCounts(index.flat[:, None] == np.arange(entries[0]), index.root)

    def _summed(self, body: Body, e: Equation) -> RowCounts | None:
        """Return the counts that a sum over all rows of a function of their labels is."""
        table = self.of(e.operands[0])
        if table is None or table.root is None or tuple(e.params["axes"]) != tuple(range(table.rows)):
            return None
        rest = table.values.reshape(table.values.shape[0], *table.values.shape[table.rows :])
        return RowCounts(rest, table.root) if rest.shape[1:] == body.tensors[e.results[0]].shape and rest.ndim == 2 else None


def _counts_exactly(dtype: Any, rows: int) -> bool:
    """Return whether a type can count up to a number of rows without rounding or overflow."""
    if np.dtype(dtype).kind in "iu":
        return rows <= np.iinfo(dtype).max
    return np.dtype(dtype).kind == "f" and rows <= 1 << np.finfo(dtype).nmant


def _reshaped(table: IntegerTable, before: Shape, after: Shape) -> IntegerTable | None:
    """Return a table in another shape, if rows stay rows, and nothing else changes but dimensions of size one."""
    values = table.values
    if table.root is None:
        ones = values.size == 1
        return (
            replace(table, values=values.reshape((1,) * len(after) if ones else after))
            if ones or values.size == prod(after)
            else None
        )
    if prod(before) != prod(before[: table.rows]) or not after:
        return None
    rows = len(after)
    while rows > 1 and after[rows - 1] == 1:
        rows -= 1
    return replace(table, values=values.reshape(-1, *(1,) * (len(after) - 1)), rows=rows)


def _converted(values: np.ndarray, dtype: Any) -> np.ndarray | None:
    """Convert values as XLA does: integers wrap around. None for floats out of the range of integers, at which XLA saturates."""
    wraps = values.dtype.kind != "f" and np.dtype(dtype).kind != "f"
    return values.astype(dtype) if wraps else _exactly(values, dtype)


def _exactly(values: np.ndarray, dtype: Any) -> np.ndarray | None:
    """Return values in a type that has them all, and that XLA computes with as NumPy does; None for any other type.

    Floats have to be integers: a sum of fractions may be rounded otherwise, as where XLA fuses it with a product.
    """
    if values.dtype == dtype and values.dtype.kind != "f":
        return values
    with np.errstate(all="ignore"):
        out = values.astype(dtype)
    if not np.array_equal(out, values):
        return None
    return out if out.dtype.kind != "f" or np.all((np.abs(out) <= 1 << np.finfo(dtype).nmant) & (out == np.trunc(out))) else None


def _type(tensor: Tensor) -> tuple[Shape, Any]:
    return tensor.shape, tensor.dtype


def _is_number(dtype: Any) -> bool:
    """Return whether NumPy computes with a type."""
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and np.dtype(dtype).kind in "biuf"
