"""Loops whose rows end apart: they go on for as long as any row does, and leave a row as it is that is done.

    carry: going [rows], x [rows, ...]
    while any(going):
        x = where(going, step(x), x)
        going = going & ...

So `vmap` makes loops (`looping.py`), and so they are written by hand, often with `done` in the place of `~going`. A device that has
some of the rows may stop when these are done: further steps would change nothing of them. So such a loop can be divided along its
rows, and devices need not agree on how many steps it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jax import lax

from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.propagation.derivative_rules import close
from unity.pcg.types.parallel_type import State

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Where the rows of a loop are.

    Args:
        at: which of the tensors that go round says which rows go on, or, if `ended`, which are done.
        ended: see `at`.
        dims: for each tensor that goes round, where the rows' dimensions are among its own; None: it stays as it is.
    """

    at: int
    ended: bool
    dims: tuple[Dims | None, ...]

    def more(self, carry: Sequence[Any]) -> Any:
        """Whether any of the rows that are there goes on."""
        rows = carry[self.at]
        every = range(rows.ndim)
        return lax.bitwise_not(lax.reduce_and(rows, every)) if self.ended else lax.reduce_or(rows, every)

    def divide(self, carry: Sequence[State]) -> bool:
        """Whether tensors in these states are divided along the rows, all alike."""
        rows = carry[self.at]
        if rows.kind != "P":
            return False
        every = zip(carry, self.dims, strict=True)
        return all(dims is None or s == State("P", dims[rows.dim], rows.outer) for s, dims in every)


@lru_cache(maxsize=1024)
def rows_of(equation: Equation) -> Rows | None:
    """The rows of a `while` loop, if these end apart."""
    params = equation.params
    found = _looked_at(close(params["cond_jaxpr"]), params["cond_nconsts"])
    if found is None:
        return None
    at, ended = found
    step = _Made(close(params["body_jaxpr"]))
    before, after = step.body.inputs[params["body_nconsts"] :], step.body.outputs
    rows = before[at]
    kept = step.by(after[at])
    if kept is None or kept.name != ("or" if ended else "and") or rows not in kept.operands:
        return None
    dims: list[Dims | None] = []
    for k, (old, new) in enumerate(zip(before, after, strict=True)):
        if k == at or new == old:
            dims.append(tuple(range(len(step.body.tensors[rows].shape))) if k == at else None)
            continue
        chosen = step.by(new)
        if chosen is None or chosen.name != "select_n" or len(chosen.operands) != 3 or chosen.operands[1 + ended] != old:
            return None
        spread = step.spread(chosen.operands[0], rows)
        if spread is None:
            return None
        dims.append(spread)
    return Rows(at, ended, tuple(dims))


def _looked_at(test: Body, closed: int) -> tuple[int, bool] | None:
    """Which tensor that goes round a predicate looks at, all of it: whether any element is true, or (then True) not all are."""
    made = _Made(test)
    last = made.by(test.outputs[0])
    ended = last is not None and last.name == "not"
    if last is not None and ended:
        last = made.by(last.operands[0])
    if last is None or last.name != ("reduce_and" if ended else "reduce_or"):
        return None
    (rows,) = last.operands
    if rows not in test.inputs[closed:] or len(last.params["axes"]) != len(test.tensor(rows).shape):
        return None
    return test.inputs.index(rows) - closed, ended


class _Made:
    """What makes the variables of a program."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self._by = {v: e for e in body.equations for v in e.results}

    def by(self, atom: Atom) -> Equation | None:
        """The equation that makes something; inputs and constants are there."""
        return self._by.get(atom) if isinstance(atom, int) else None

    def spread(self, atom: Atom, rows: int) -> Dims | None:
        """Where the dimensions of `rows` are in what is that, broadcast, if it is."""
        shape = self.body.tensors[rows].shape
        if atom == rows:
            return tuple(range(len(shape)))
        made = self.by(atom)
        inner = self.spread(made.operands[0], rows) if made is not None and made.name == "broadcast_in_dim" else None
        if made is None or inner is None:
            return None
        found = tuple(made.params["broadcast_dimensions"][dim] for dim in inner)
        return found if tuple(self.body.tensor(atom).shape[dim] for dim in found) == shape else None
