"""Loops whose rows finish independently: they run while any row is active, and leave finished rows unchanged.

    carry: going [rows], x [rows, ...]
    while any(going):
        x = where(going, step(x), x)
        going = going & ...

`vmap` of a `while_loop` has this form, and people write it by hand, often with `done` in place of `~going`. A device that has some
of the rows may stop when these are finished, since further steps would not change them. Such a loop can therefore be divided along
its rows, and devices need not agree on a number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jax import lax

from unity.pcg.ir.program import Atom, Body, Equation, close
from unity.pcg.types.parallel_type import State

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """The rows of a loop.

    Attributes:
        at: the position in the carry of the flags of the rows.
        ended: whether a flag marks a finished row; otherwise it marks an active one.
        dims: for each tensor of the carry its dimensions that are those of the rows; None: no step changes it.
    """

    at: int
    ended: bool
    dims: tuple[Dims | None, ...]

    def more(self, carry: Sequence[Any]) -> Any:
        """Return whether any row of these pieces is active."""
        rows = carry[self.at]
        dims = range(rows.ndim)
        return lax.bitwise_not(lax.reduce_and(rows, dims)) if self.ended else lax.reduce_or(rows, dims)

    def divide(self, carry: Sequence[State]) -> bool:
        """Return whether a carry in these states is divided along the rows, all tensors alike."""
        rows = carry[self.at]
        if rows.kind != "P":
            return False
        return all(dims is None or s == State("P", dims[rows.dim], rows.outer) for s, dims in zip(carry, self.dims, strict=True))


@lru_cache(maxsize=1024)
def rows_of(equation: Equation) -> Rows | None:
    """Return the rows of a `while` loop; None if it has none that finish independently."""
    params = equation.params
    flags = _row_flags(close(params["cond_jaxpr"]), params["cond_nconsts"])
    if flags is None:
        return None
    at, ended = flags
    step = _Producers(close(params["body_jaxpr"]))
    before, after = step.body.inputs[params["body_nconsts"] :], step.body.outputs
    rows = before[at]
    update = step.of(after[at])
    if update is None or update.name != ("or" if ended else "and") or rows not in update.operands:
        return None
    dims: list[Dims | None] = []
    for k, (old, new) in enumerate(zip(before, after, strict=True)):
        if k == at or new == old:
            dims.append(tuple(range(len(step.body.tensors[rows].shape))) if k == at else None)
            continue
        select = step.of(new)
        if select is None or select.name != "select_n" or len(select.operands) != 3 or select.operands[1 + ended] != old:
            return None
        row_dims = step.broadcast_dims(select.operands[0], rows)
        if row_dims is None:
            return None
        dims.append(row_dims)
    return Rows(at, ended, tuple(dims))


def _row_flags(test: Body, closed: int) -> tuple[int, bool] | None:
    """Return the carried tensor that a predicate reduces as a whole, and whether its elements mark finished rows.

    Args:
        test: the predicate: whether any element is true (marks of active rows), or not all are (marks of finished rows).
        closed: how many of its inputs are constants.
    """
    producers = _Producers(test)
    last = producers.of(test.outputs[0])
    ended = last is not None and last.name == "not"
    if last is not None and ended:
        last = producers.of(last.operands[0])
    if last is None or last.name != ("reduce_and" if ended else "reduce_or"):
        return None
    (rows,) = last.operands
    if rows not in test.inputs[closed:] or len(last.params["axes"]) != len(test.tensor(rows).shape):
        return None
    return test.inputs.index(rows) - closed, ended


class _Producers:
    """The equations that produce the variables of a program."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self._of = {v: e for e in body.equations for v in e.results}

    def of(self, atom: Atom) -> Equation | None:
        """Return the equation that produces an atom; None for inputs and literals."""
        return self._of.get(atom) if isinstance(atom, int) else None

    def broadcast_dims(self, atom: Atom, rows: int) -> Dims | None:
        """Return the dimensions of `rows` in an atom that is a broadcast of it; None if the atom is not."""
        shape = self.body.tensors[rows].shape
        if atom == rows:
            return tuple(range(len(shape)))
        producer = self.of(atom)
        if producer is None or producer.name != "broadcast_in_dim":
            return None
        inner = self.broadcast_dims(producer.operands[0], rows)
        if inner is None:
            return None
        dims = tuple(producer.params["broadcast_dimensions"][dim] for dim in inner)
        return dims if tuple(self.body.tensor(atom).shape[dim] for dim in dims) == shape else None
