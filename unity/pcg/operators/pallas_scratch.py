"""Proves that a Pallas kernel overwrites its scratch memory before it reads it, so that nothing survives from a step before.

A kernel runs its steps in the order of its grid, the last dimension fastest. When devices divide a grid dimension, the first step
of each device has number zero along every dimension after it, and its scratch memory holds nothing yet. So every such step must
write all of it before it reads any, whatever the arguments are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

# Operations on the numbers that tell which step it is, such as `program_id(2) == 0`.
SCALAR_OPS: Mapping[str, Callable[..., Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "convert_element_type": lambda x: x,
}
CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")
LARGEST = 1 << 22  # elements of a reference of which parts are told apart

Unset = dict[core.Var, np.ndarray]  # for each reference that is not wholly written, a mask that is True where it is written


def set_before_read(program: core.Jaxpr, zero_axes: Iterable[int], scratch: Sequence[core.Var]) -> bool:
    """Return whether a kernel provably writes all of the scratch memory that it uses before it reads any of it, in some steps.

    Args:
        program: the kernel's.
        zero_axes: the grid dimensions, as the program numbers them, along which the steps in question have number zero.
        scratch: the references to scratch memory.
    """
    read = {v for e in program.eqns for v in _variables(e.invars)}  # semaphores, too, whose counts are no effects
    used = [v for v in scratch if v in read]
    if any(np.prod(_shape(v)) > LARGEST for v in used):
        return False
    run = _Run(frozenset(zero_axes), {v: np.zeros(_shape(v), bool) for v in used}, {})
    return run.accepts(program) and not run.unset


def writes_operands(program: core.Jaxpr, operands: Sequence[core.Var]) -> bool:
    """Return whether a kernel writes to some references of operands: a later step may then read what it left."""
    changes = (effect for effect in program.effects if type(effect).__name__ != "ReadEffect")
    return any(getattr(effect, "input", None) in operands for effect in changes)


class _Run:
    """Abstract interpretation of a kernel's first steps: which scratch memory is not written yet, and which scalars are known.

    Attributes:
        zero_axes: grid dimensions along which the step is zero.
        unset: for each reference that is not wholly written, a mask that is True where it is.
        scalars: the known values of integers and booleans, as numpy scalars of their types.
        old: the variables that hold what a swap replaced in elements that were not written; nothing may read them.
    """

    def __init__(self, zero_axes: frozenset[int], unset: Unset, scalars: dict[core.Var, Any]) -> None:
        self.zero_axes, self.unset, self.scalars = zero_axes, unset, scalars
        self.old = set[core.Var]()

    def accepts(self, program: core.Jaxpr) -> bool:
        """Run a program. Returns whether it reads only what is set."""
        return all(map(self.runs, program.eqns)) and self.old.isdisjoint(_variables(program.outvars))

    def runs(self, e: core.JaxprEqn) -> bool:
        """Run an equation. Returns whether it reads only what is set."""
        name, read = e.primitive.name, _variables(e.invars)
        if not self.old.isdisjoint(read):
            return False
        if name == "cond":
            return self.branches(e)
        if not any(v in self.unset for v in read):
            self.compute(e)
            return True
        if name in ("get", "swap") and sum(v in self.unset for v in read) == 1 and e.invars[0] in self.unset:
            return self.access(e)
        if name == "while":
            return self.loop(e)
        if name == "scan" and e.params["length"]:
            return self.inside(e.params["jaxpr"], e.invars, {})
        if name in CALLS:
            return self.inside(e.params.get("jaxpr", e.params.get("call_jaxpr")), e.invars, self.scalars)
        return False

    def compute(self, e: core.JaxprEqn) -> None:
        """Note the integer or boolean that an equation computes, if it is known."""
        name = e.primitive.name
        if name == "program_id" and e.params["axis"] in self.zero_axes:
            self.scalars[e.outvars[0]] = np.int32(0)
        elif name in SCALAR_OPS and len(e.outvars) == 1 and _is_counted(e.outvars[0]):
            values = [self.scalar(v) for v in e.invars]
            if all(value is not None for value in values):
                result: Any = e.outvars[0].aval
                with np.errstate(over="ignore"):  # as the kernel's, narrow integers wrap around
                    self.scalars[e.outvars[0]] = np.asarray(SCALAR_OPS[name](*values)).astype(result.dtype)[()]

    def scalar(self, atom: Any) -> Any:
        """Return the value of a known integer or boolean, None for any other."""
        if isinstance(atom, core.Literal):
            return np.asarray(atom.val, getattr(atom.aval, "dtype", None))[()] if _is_counted(atom) else None
        return self.scalars.get(atom)

    def access(self, e: core.JaxprEqn) -> bool:
        """Read or write a part of a reference. Returns whether what is read is written."""
        reference = e.invars[0]
        assert isinstance(reference, core.Var)
        where = _elements(e)
        if e.primitive.name == "get":
            return where is not None and bool(self.unset[reference][where].all())
        if where is not None:
            self.old.update(() if self.unset[reference][where].all() else e.outvars)
            written = self.unset[reference].copy()
            written[where] = True
            self.unset[reference] = written
            if written.all():
                del self.unset[reference]
        else:
            self.old.update(e.outvars)
        return True

    def branches(self, e: core.JaxprEqn) -> bool:
        """Run the branch that is taken, or all if it is not known which: then what is set is what each of them sets."""
        index, branches = self.scalar(e.invars[0]), e.params["branches"]
        possible = branches if index is None else [branches[min(max(int(index), 0), len(branches) - 1)]]
        runs = [_Run(self.zero_axes, dict(self.unset), self.scalars) for _ in possible]
        if not all(run.inside(branch, e.invars[1:], self.scalars) for run, branch in zip(runs, possible, strict=True)):
            return False
        for v in list(self.unset):
            written = [run.unset[v] for run in runs if v in run.unset]
            if written:
                self.unset[v] = np.logical_and.reduce(written)
            else:
                del self.unset[v]
        return True

    def loop(self, e: core.JaxprEqn) -> bool:
        """Run the condition and one step of a loop that may take none, so that nothing is set by it."""
        conditions, steps = e.params["cond_nconsts"], e.params["body_nconsts"]
        carry = e.invars[conditions + steps :]
        parts = (
            (e.params["cond_jaxpr"], [*e.invars[:conditions], *carry]),
            (e.params["body_jaxpr"], [*e.invars[conditions : conditions + steps], *carry]),
        )
        return all(_Run(self.zero_axes, dict(self.unset), {}).inside(part, values, {}) for part, values in parts)

    def inside(self, program: Any, operands: Sequence[Any], scalars: Mapping[core.Var, Any]) -> bool:
        """Run a nested program on operands. Returns whether it reads only what is set.

        Args:
            program: the program.
            operands: its operands.
            scalars: the known values of operands; none for the body of a loop, whose operands differ from step to step.
        """
        program = getattr(program, "jaxpr", program)
        if program.constvars or len(program.invars) != len(operands):
            return False
        outer = {v: operand for v, operand in zip(program.invars, operands, strict=True) if isinstance(operand, core.Var)}
        unset = {v: self.unset[operand] for v, operand in outer.items() if operand in self.unset}
        run = _Run(self.zero_axes, dict(unset), {v: scalars[operand] for v, operand in outer.items() if operand in scalars})
        if not run.accepts(program):
            return False
        for v in unset:
            if v in run.unset:
                self.unset[outer[v]] = run.unset[v]
            else:
                self.unset.pop(outer[v], None)
        return True


def _elements(e: core.JaxprEqn) -> tuple[slice | int, ...] | None:
    """Return the elements that a `get` or a `swap` accesses, as an index; None if they are not known before the kernel runs."""
    reference: Any = e.invars[0].aval
    value: Any = (e.invars[1] if e.primitive.name == "swap" else e.outvars[0]).aval
    atoms = e.invars[2 if e.primitive.name == "swap" else 1 :]
    if value.dtype != reference.dtype:  # as integers of other bits
        return None
    if value.size == np.prod(_shape(e.invars[0])) and not any(getattr(v.aval, "shape", ()) for v in atoms):
        return (slice(None),) * len(reference.shape)  # as many as there are, and no index array that could repeat one
    transforms = jax.tree.unflatten(e.params["tree"], [v.val if isinstance(v, core.Literal) else None for v in atoms])
    if len(transforms) != 1 or not hasattr(transforms[0], "indices"):
        return None
    index = [_index(i) for i in transforms[0].indices]
    return None if None in index else tuple(i for i in index if i is not None)


def _index(index: Any) -> slice | int | None:
    """Return an index along one dimension, None if it is not a known number or a known range."""
    if isinstance(index, int | np.integer) or (isinstance(index, np.ndarray) and index.ndim == 0):
        return int(index)
    start, size, stride = (getattr(index, name, None) for name in ("start", "size", "stride"))
    if all(isinstance(n, int | np.integer) for n in (start, size, stride)) and start is not None and start >= 0 and size and stride:
        return slice(int(start), int(start) + (int(size) - 1) * int(stride) + 1, int(stride))
    return None


def _is_counted(atom: Any) -> bool:
    """Return whether an atom is a boolean or an integer."""
    dtype = getattr(atom.aval, "dtype", None)
    return not getattr(atom.aval, "shape", ()) and isinstance(dtype, np.dtype) and dtype.kind in "biu"


def _shape(reference: Any) -> tuple[int, ...]:
    return tuple(reference.aval.shape)


def _variables(atoms: Iterable[Any]) -> Collection[core.Var]:
    return [v for v in atoms if isinstance(v, core.Var)]
