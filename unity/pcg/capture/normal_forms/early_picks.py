"""Look-ups of single elements that move before the sums that only they read: `(x - row)[i, y[i]]` is `x[i, y[i]] - row[i]`.

A cross-entropy picks one logarithm of a probability in each row. The gradient of the logarithms is zero but there, and would be
added up over all of a row to be that of the row's normalizer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax.extend.core import primitives

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Atom, Body, Equation, Tensor
from unity.pcg.types.accumulation import narrow

# Their derivatives read no values: those of an element out of range, which is not a number, do not reach the gradient.
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
    return bool(e.params["dimension_numbers"].operand_batching_dims) and body.tensor(e.operands[0]).floating


def _indexed(body: Body, pick: Equation) -> tuple[int, ...]:
    """Return the dimensions of which a look-up finds one element."""
    rows = pick.params["dimension_numbers"].operand_batching_dims
    return tuple(d for d in range(body.tensor(pick.operands[0]).ndim) if d not in rows)


class _Picks:
    """The rewriting of one body."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.tensors: dict[int, Tensor] = dict(body.tensors)
        self.next = max(body.tensors) + 1
        self.makers = {v: e for e in body.equations for v in e.results}
        self.ends = set(body.outputs)

    def run(self) -> Body:
        equations = [part for e in self.body.equations for part in (self.early(e) if _is_pick(self.body, e) else [e])]
        if len(equations) == len(self.body.equations):
            return self.body
        return used(Body(self.body.inputs, self.body.outputs, tuple(equations), self.tensors))

    def early(self, pick: Equation) -> list[Equation]:
        """Return a look-up as one of the sum's large operand, and the sum of what it finds."""
        v = pick.operands[0]
        if not isinstance(v, int) or v in self.ends or len(self.body.touching[v]) != 2:  # by its maker and by the look-up
            return [pick]
        total = self.makers.get(v)
        if total is None or total.name not in SUMS:
            return [pick]
        shape, indexed = self.body.tensor(v).shape, _indexed(self.body, pick)
        large = [k for k, a in enumerate(total.operands) if self.body.tensor(a).shape == shape]
        if len(large) != 1 or not self.body.tensor(total.operands[large[0]]).floating:
            return [pick]
        source = self.body.tensor(total.operands[large[0]]).dtype
        if narrow(source) and source != self.body.tensor(v).dtype:  # there, gradients of equal picks would be added up
            return [pick]
        before: list[Equation] = []
        operands = list(total.operands)
        for k, atom in enumerate(total.operands):
            tensor = self.body.tensor(atom)
            if k == large[0]:
                operands[k] = self.new(replace(tensor, shape=self.tensors[pick.results[0]].shape))
            elif tensor.ndim:
                if tensor.ndim != len(shape) or any(tensor.shape[d] != 1 for d in indexed):
                    return [pick]
                operands[k] = self.of_rows(pick, atom, before)
        moved = replace(pick, operands=(total.operands[large[0]], *pick.operands[1:]), results=(operands[large[0]],), origin=None)
        after = replace(total, operands=tuple(operands), results=pick.results, origin=None)
        return [*self.early(moved), *before, after]

    def of_rows(self, pick: Equation, atom: Atom, before: list[Equation]) -> int:
        """Append the equations of the values of the rows, in the shape of what the look-up finds; return the result."""
        numbers, tensor = pick.params["dimension_numbers"], self.body.tensor(atom)
        indexed, shape = _indexed(self.body, pick), self.tensors[pick.results[0]].shape
        rows = replace(tensor, shape=tuple(n for d, n in enumerate(tensor.shape) if d not in indexed))
        places = [k for k in range(len(shape)) if k not in numbers.offset_dims]
        place_of = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
        order = tuple(places[place_of[d]] for d in range(tensor.ndim) if d not in indexed)
        squeezed, ordered = self.new(rows), self.new(replace(tensor, shape=shape))
        steps: list[tuple[Any, dict[str, Any], Atom, int]] = [
            (primitives.squeeze_p, {"dimensions": indexed}, atom, squeezed),
            (primitives.broadcast_in_dim_p, {"shape": shape, "broadcast_dimensions": order, "sharding": None}, squeezed, ordered),
        ]
        for primitive, params, operand, result in steps:
            before.append(replace(pick, primitive=primitive, params=params, operands=(operand,), results=(result,), origin=None))
        return ordered

    def new(self, tensor: Tensor) -> int:
        v, self.next = self.next, self.next + 1
        self.tensors[v] = tensor
        return v
