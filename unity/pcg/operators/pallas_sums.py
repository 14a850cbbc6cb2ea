"""Sums that Pallas kernels accumulate over the steps of a grid dimension, as proved by their programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from unity.pcg.jaxprs.jaxprs import equations

STEP = ("program_id", "num_programs")  # primitives by which a program asks for the number of its step, or of all steps
NAMED_STEP = "axis_index"  # the same for a grid dimension with a name


def asks_for_any_step(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation asks for the step along some grid dimension."""
    return eqn.primitive.name in (*STEP, NAMED_STEP)


def asks_for_step(eqn: core.JaxprEqn, axis: int) -> bool:
    """Return whether an equation, or one nested in it, may ask for the step along a grid dimension."""
    return any(asks_for_any_step(e) and e.params.get("axis", axis) == axis for e in (eqn, *equations(eqn)))


def is_sum(program: core.Jaxpr, axis: int, totals: Sequence[core.Var]) -> bool:
    """Return whether each of some results is the sum of what the steps along a grid dimension add to it.

    The program must set each total to zero in the first step, as the only thing that it does by the number of the step, and then
    add a value to it, which does not depend on the totals.

    Args:
        program: the kernel's.
        axis: the grid dimension, as the program numbers it.
        totals: the references of these results.
    """
    proof = _Proof(axis, frozenset(totals))
    return all(map(proof.accepts, program.eqns)) and proof.added == proof.cleared == set(totals)


class _Proof:
    """A walk through a kernel's program, with what its variables are.

    steps: the number of the step.
    firsts: whether it is the first step.
    old, new: a total before, and after, a value is added to it, by variable.
    opaque: values of totals that nothing may read.
    cleared, added: the totals that were set to zero, and then added to.
    """

    def __init__(self, axis: int, totals: frozenset[core.Var]) -> None:
        self.axis, self.totals = axis, totals
        self.steps, self.firsts, self.opaque = set[core.Var](), set[core.Var](), set[core.Var]()
        self.old, self.new = dict[core.Var, core.Var](), dict[core.Var, core.Var]()
        self.cleared, self.added = set[core.Var](), set[core.Var]()

    def accepts(self, e: core.JaxprEqn) -> bool:
        """Return whether an equation is part of a sum, or has nothing to do with it."""
        read = _variables(e)
        if e.primitive.name == "program_id" and e.params["axis"] == self.axis:
            self.steps.update(e.outvars)
            return True
        if read & self.steps:
            self.firsts.update(e.outvars)
            return e.primitive.name == "eq" and any(_is_zero(v) for v in e.invars)
        if read & self.firsts:
            return self.tells_first(e)
        if asks_for_step(e, self.axis) or read & self.opaque:
            return False
        if read & self.totals:
            return self.uses_total(e)
        return not read & (self.old.keys() | self.new.keys()) or self.adds(e)

    def tells_first(self, e: core.JaxprEqn) -> bool:
        """Return whether an equation that depends on whether this is the first step sets totals to zero in it, and nothing else."""
        if e.primitive.name == "convert_element_type":
            self.firsts.update(e.outvars)
            return True
        rest = {v for v in e.invars[1:] if isinstance(v, core.Var)}
        if e.primitive.name != "cond" or rest & self.firsts or e.outvars or len(e.params["branches"]) != 2:
            return False
        other, first = (b.jaxpr for b in e.params["branches"])
        outer: dict[Any, Any]
        outer, zeros = dict(zip(first.invars, e.invars[1:], strict=True)), set[core.Var]()
        for inner in first.eqns:
            target, value, *_ = (*inner.invars, None, None)
            if inner.primitive.name == "broadcast_in_dim" and _is_zero(target):
                zeros.update(inner.outvars)
            elif inner.primitive.name == "swap" and _is_whole(inner) and isinstance(value, core.Var) and value in zeros:
                self.cleared.add(outer[target])
            else:
                return False
        return not other.eqns and self.cleared <= self.totals - self.added

    def uses_total(self, e: core.JaxprEqn) -> bool:
        """Return whether an equation reads a total, or writes it with a value added."""
        total, *rest = e.invars
        if total not in self.cleared or not _is_whole(e):
            return False
        if e.primitive.name == "get":
            self.old[e.outvars[0]] = total
            return True
        if total in self.added or not self.is_added(e, rest[0], total):
            return False
        self.added.add(total)
        self.opaque.update(e.outvars)
        return True

    def is_added(self, e: core.JaxprEqn, value: Any, total: core.Var) -> bool:
        """Return whether an equation writes a total to which a value was added, or adds a value to it in place."""
        if e.primitive.name == "addupdate":
            return value not in self.totals and value not in self.old and value not in self.new
        return isinstance(value, core.Var) and self.new.get(value) is total

    def adds(self, e: core.JaxprEqn) -> bool:
        """Return whether an equation adds a value to a total that was read, once."""
        totals = [v for v in e.invars if isinstance(v, core.Var) and v in self.old]
        if e.primitive.name != "add" or len(totals) != 1 or _variables(e) & self.new.keys():
            return False
        self.new[e.outvars[0]] = self.old[totals[0]]
        return True


def _variables(e: core.JaxprEqn) -> set[core.Var]:
    """Return the variables that an equation reads."""
    return {v for v in e.invars if isinstance(v, core.Var)}


def _is_zero(v: Any) -> bool:
    return isinstance(v, core.Literal) and not np.any(np.asarray(v.val))


def _is_whole(e: core.JaxprEqn) -> bool:
    """Return whether an equation reads, writes or adds to all of a reference, with its elements in their places."""
    if e.primitive.name not in ("get", "swap", "addupdate"):
        return False
    atoms = e.invars if e.primitive.name == "get" else e.invars[1:]  # the value, then numbers in the index
    reference: Any = e.invars[0].aval
    value: Any = (e.outvars if e.primitive.name == "get" else atoms)[0].aval
    if len(atoms) != 1 or value.shape != reference.shape or value.dtype != reference.dtype:
        return False
    transforms = jax.tree.unflatten(e.params["tree"], [])
    return all(hasattr(transform, "indices") for transform in transforms)  # a transposed view of a square has its shape
