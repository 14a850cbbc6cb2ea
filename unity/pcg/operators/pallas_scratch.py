"""Scratch memory of Pallas kernels that is set before it is read, so that nothing in it comes from a step before.

A kernel runs its steps in the order of its grid, the last dimension fastest. Devices that divide a grid dimension begin with steps
whose numbers along all later dimensions are zero, and find nothing in their scratch memory that they did not write. So each of
these steps must write all of it before it reads any, whatever the arguments are. `set_before_read` proves that by the program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

# Primitives of numbers that tell which step it is, such as `program_id(2) == 0`.
NUMBERS: Mapping[str, Callable[..., Any]] = {
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


def set_before_read(program: core.Jaxpr, first: Iterable[int], scratch: Sequence[core.Var]) -> bool:
    """Return whether a kernel writes all of its scratch memory before it reads any of it, in some steps.

    Args:
        program: the kernel's.
        first: the grid dimensions, as the program numbers them, along which these are the first steps.
        scratch: the references of the scratch memory.
    """
    run = _Run(frozenset(first), set(scratch), {})
    return run.of(program) and not run.unset


class _Run:
    """A run of a program as far as scratch memory is concerned.

    Attributes:
        first: grid dimensions whose step is zero.
        unset: the references of scratch memory that is not written yet.
        numbers: the values of variables that are known.
        old: the variables with what was in a reference before it was written, which nothing may read.
    """

    def __init__(self, first: frozenset[int], unset: set[core.Var], numbers: dict[core.Var, Any]) -> None:
        self.first, self.unset, self.numbers = first, unset, numbers
        self.old = set[core.Var]()

    def of(self, program: core.Jaxpr) -> bool:
        """Run a program. Returns whether it reads only what is set."""
        return all(map(self.accepts, program.eqns)) and self.old.isdisjoint(_variables(program.outvars))

    def accepts(self, e: core.JaxprEqn) -> bool:
        """Run an equation. Returns whether it reads only what is set."""
        name, read = e.primitive.name, _variables(e.invars)
        touched = [v for v in read if v in self.unset]
        if not self.old.isdisjoint(read):
            return False
        if name == "cond":
            return self.branches(e)
        if not touched:
            self.compute(e)
            return True
        if name == "swap" and touched == e.invars[:1] and _writes_all(e):
            self.unset.discard(touched[0])
            self.old.update(e.outvars)
            return True
        if name == "while":
            return self.loop(e)
        inner = e.params.get("jaxpr", e.params.get("call_jaxpr"))  # of a scan, which takes at least one step, or of a call
        if inner is None or e.params.get("length", 1) == 0:
            return False
        return self.inside(inner, e.invars)

    def compute(self, e: core.JaxprEqn) -> None:
        """Note the number that an equation computes, if it is known."""
        name = e.primitive.name
        if name == "program_id" and e.params["axis"] in self.first:
            self.numbers[e.outvars[0]] = 0
        elif name in NUMBERS:
            values = [v.val if isinstance(v, core.Literal) else self.numbers.get(v) for v in e.invars]
            if all(v is not None and np.ndim(v) == 0 for v in values):
                self.numbers[e.outvars[0]] = NUMBERS[name](*values)

    def branches(self, e: core.JaxprEqn) -> bool:
        """Run the branch that is taken, or all if it is not known which: then what is set is what each of them sets."""
        index: Any = e.invars[0]
        number = index.val if isinstance(index, core.Literal) else self.numbers.get(index)
        branches = e.params["branches"]
        possible = branches if number is None else [branches[min(max(int(number), 0), len(branches) - 1)]]
        runs = [_Run(self.first, set(self.unset), self.numbers) for _ in possible]
        if not all(run.inside(branch, e.invars[1:]) for run, branch in zip(runs, possible, strict=True)):
            return False
        self.unset = set[core.Var]().union(*(run.unset for run in runs))
        return True

    def loop(self, e: core.JaxprEqn) -> bool:
        """Run the condition and one step of a loop that may take none, so that nothing is set by it."""
        conditions, steps = e.params["cond_nconsts"], e.params["body_nconsts"]
        carry = e.invars[conditions + steps :]
        parts = (
            (e.params["cond_jaxpr"], [*e.invars[:conditions], *carry]),
            (e.params["body_jaxpr"], [*e.invars[conditions : conditions + steps], *carry]),
        )
        return all(_Run(self.first, set(self.unset), self.numbers).inside(part, values) for part, values in parts)

    def inside(self, program: Any, operands: Sequence[Any]) -> bool:
        """Run a nested program on operands. Returns whether it reads only what is set."""
        program = getattr(program, "jaxpr", program)
        outer = dict(zip(program.invars, operands, strict=True))
        inner = {v for v, operand in outer.items() if isinstance(operand, core.Var) and operand in self.unset}
        known = {
            v: n for v, operand in outer.items() if isinstance(operand, core.Var) and (n := self.numbers.get(operand)) is not None
        }
        run = _Run(self.first, set(inner), known)
        if not run.of(program):
            return False
        self.unset -= {outer[v] for v in inner - run.unset}
        return True


def _writes_all(e: core.JaxprEqn) -> bool:
    """Return whether a `swap` writes all of a reference: as many elements, none of them twice."""
    reference: Any = e.invars[0].aval
    value: Any = e.invars[1].aval
    indices: list[Any] = [v.aval for v in e.invars[2:]]
    return value.size == reference.size and not any(i.shape for i in indices)


def _variables(atoms: Iterable[Any]) -> list[core.Var]:
    return [v for v in atoms if isinstance(v, core.Var)]
