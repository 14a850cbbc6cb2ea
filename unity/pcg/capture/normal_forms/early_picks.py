"""Look-ups of single elements that move before the sums that only they read: `(x - row)[i, y[i]]` is `x[i, y[i]] - row[i]`.

A cross-entropy picks one logarithm of a probability in each row. The gradient of the logarithms is zero but there, and would be
added up over all of a row to be that of the row's normalizer.

An index out of range has no gradient in JAX, be its element not a number or, where it breaks a promise, the nearest one. So nor has
the row's value there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.types.accumulation import narrow

Mode = lax.GatherScatterMode
SUMS = ("add", "sub", "neg", "convert_element_type")


def with_early_picks(body: Body) -> Body:
    """Return a body in which no look-up of single elements reads a sum of a tensor and one value for each of its rows."""
    if not any(_is_pick(body, e) for e in body.equations):
        return body
    return _Picks(body).run()


def _is_pick(body: Body, e: Equation) -> bool:
    """Return whether an equation looks up one element in each row, as `take_along_axis` does."""
    if e.name != "gather" or any(size != 1 for size in e.params["slice_sizes"]):
        return False
    fill = e.params["fill_value"] if e.params["mode"] == Mode.FILL_OR_DROP else None
    fills = fill is not None and not np.isnan(fill)  # with a number, in the place of a sum
    return not fills and bool(e.params["dimension_numbers"].operand_batching_dims) and body.tensor(e.operands[0]).floating


def _indexed(body: Body, pick: Equation) -> tuple[int, ...]:
    """Return the dimensions of which a look-up finds one element."""
    rows = pick.params["dimension_numbers"].operand_batching_dims
    return tuple(d for d in range(body.tensor(pick.operands[0]).ndim) if d not in rows)


class _Picks:
    """The rewriting of one body."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.writer = EquationWriter.beside(body)
        self.makers = {v: e for e in body.equations for v in e.results}
        self.ends = set(body.outputs)

    def run(self) -> Body:
        changed = False
        for e in self.body.equations:
            moves = _is_pick(self.body, e) and self.sum_before(e) is not None
            changed |= moves
            if not moves or e.params["mode"] == Mode.CLIP:  # clamped, an index is that of another element
                self.append(e)
            else:
                total = self.writer.new(self.body.tensors[e.results[0]])
                self.append(replace(e, results=(total,), origin=None))
                self.drop_outside_gradients(e, total)
        return used(self.writer.body(self.body.inputs, self.body.outputs)) if changed else self.body

    def append(self, e: Equation) -> None:
        """Append an equation; a look-up as one of the sum's large operand, and the sum of what it finds."""
        before = self.sum_before(e) if _is_pick(self.body, e) else None
        if before is None:
            self.writer.equations.append(e)
            return
        total, large = before
        operands = list(total.operands)
        for k, atom in enumerate(total.operands):
            tensor = self.body.tensor(atom)
            if k == large:
                operands[k] = self.writer.new(replace(tensor, shape=self.writer.tensors[e.results[0]].shape))
                self.append(replace(e, operands=(atom, *e.operands[1:]), results=(operands[k],), origin=None))
            elif tensor.ndim:
                operands[k] = self.of_rows(e, atom)
        self.writer.equations.append(replace(total, operands=tuple(operands), results=e.results, origin=None))

    def sum_before(self, pick: Equation) -> tuple[Equation, int] | None:
        """Return the sum that only a look-up reads, and the position of its large operand; None if the look-up stays."""
        v = pick.operands[0]
        if not isinstance(v, int) or v in self.ends or len(self.body.touching[v]) != 2:  # by its maker and by the look-up
            return None
        total = self.makers.get(v)
        if total is None or total.name not in SUMS:
            return None
        shape, indexed = self.body.tensor(v).shape, _indexed(self.body, pick)
        tensors = [self.body.tensor(a) for a in total.operands]
        large = [k for k, t in enumerate(tensors) if t.shape == shape]
        if len(large) != 1 or not tensors[large[0]].floating:
            return None
        source = tensors[large[0]].dtype
        if narrow(source) and source != self.body.tensor(v).dtype:  # there, gradients of equal picks would be added up
            return None
        others = [t for k, t in enumerate(tensors) if t.ndim and k != large[0]]
        if any(t.ndim != len(shape) or any(t.shape[d] != 1 for d in indexed) for t in others):
            return None
        return total, large[0]

    def of_rows(self, pick: Equation, atom: Atom) -> int:
        """Append the equations of the values of the rows, in the shape of what the look-up finds; return the result."""
        numbers, tensor = pick.params["dimension_numbers"], self.body.tensor(atom)
        indexed, shape = _indexed(self.body, pick), self.writer.tensors[pick.results[0]].shape
        rows = replace(tensor, shape=tuple(n for d, n in enumerate(tensor.shape) if d not in indexed))
        places = _places(pick, len(shape))
        place_of = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
        order = tuple(places[place_of[d]] for d in range(tensor.ndim) if d not in indexed)
        squeezed, ordered = self.writer.new(rows), self.writer.new(replace(tensor, shape=shape))
        steps: list[tuple[Any, dict[str, Any], Atom, int]] = [
            (primitives.squeeze_p, {"dimensions": indexed}, atom, squeezed),
            (primitives.broadcast_in_dim_p, {"shape": shape, "broadcast_dimensions": order, "sharding": None}, squeezed, ordered),
        ]
        for primitive, params, operand, result in steps:
            e = replace(pick, primitive=primitive, params=params, operands=(operand,), results=(result,), origin=None)
            self.writer.equations.append(e)
        return ordered

    def drop_outside_gradients(self, pick: Equation, total: int) -> None:
        """Append the equations of what a look-up found: `total`, whose gradient is zero for indices out of range."""
        shape, (result,) = self.writer.tensors[total].shape, pick.results
        table, dims = self.body.tensor(pick.operands[0]).shape, pick.params["dimension_numbers"].start_index_map

        def found(x: Any, indices: Any) -> Any:
            last = np.minimum([table[d] - 1 for d in dims], jnp.iinfo(indices.dtype).max).astype(indices.dtype)
            inside = ((indices >= 0) & (indices <= last)).all(-1)
            return lax.select(lax.broadcast_in_dim(inside, shape, _places(pick, len(shape))), x, lax.stop_gradient(x))

        self.writer.trace(found, (total, pick.operands[1]), pick, {0: result})


def _places(pick: Equation, ndim: int) -> list[int]:
    """Return the dimensions of the result of a look-up, of `ndim` dimensions, that its indices have, too."""
    return [k for k in range(ndim) if k not in pick.params["dimension_numbers"].offset_dims]
