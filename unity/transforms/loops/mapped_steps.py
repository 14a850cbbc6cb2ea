"""The equations of a scan's step for several steps at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Atom, Equation, Literal, Tensor
from unity.transforms.loops.dependences import ScanParts


class MappedSteps:
    """The values of a step for several steps at once, as another program computes them: for all of a loop, or one of each loop.

    Args:
        writer: the other program.
        atoms: its variables for the inputs of the step.
        stacked: the inputs that it has for all of these steps, along a leading dimension. Others are the same in each.
        tensors: the types of the step's variables.
        names: the variables of the program for some values of the step; others get new ones.
    """

    def __init__(
        self,
        writer: EquationWriter,
        atoms: Mapping[int, Atom],
        stacked: Iterable[int],
        tensors: Mapping[int, Tensor],
        names: Mapping[Atom, int] | None = None,
    ) -> None:
        self.writer, self.tensors, self.names = writer, tensors, names or {}
        self.atoms: dict[Atom, Atom] = {**atoms}
        self.stacked: set[Atom] = set(stacked)

    @classmethod
    def around(cls, writer: EquationWriter, parts: ScanParts, names: Mapping[Atom, int] | None = None) -> MappedSteps:
        """Return the values of all steps of a scan, in the program around it."""
        atoms = dict(zip(parts.step.inputs, parts.scan.operands, strict=True))
        return cls(writer, atoms, parts.slices, parts.step.tensors, names)

    def stack(self, stacks: Mapping[Atom, int]) -> None:
        """Add values of the step that the program has for all steps."""
        self.atoms |= stacks
        self.stacked.update(stacks)

    def add(self, e: Equation) -> None:
        """Add an equation of the step: as it is if no operand is stacked, and else mapped over the steps."""
        variables = tuple(dict.fromkeys(a for a in e.operands if isinstance(a, int)))
        if self.stacked.isdisjoint(variables):
            operands = tuple(self.atoms[a] if isinstance(a, int) else a for a in e.operands)
            results = tuple(self.writer.new(self.tensors[v]) for v in e.results)
            self.writer.equations.append(replace(e, operands=operands, results=results))
        else:
            mapped = _mapped(e, variables, [a in self.stacked for a in variables])
            named = {k: self.names[v] for k, v in enumerate(e.results) if v in self.names}
            types = [self.tensors[v] for v in e.results]
            results = self.writer.trace(mapped, [self.atoms[a] for a in variables], e, named, types)
            self.stacked.update(e.results)
        self.atoms.update(zip(e.results, results, strict=True))


def _mapped(e: Equation, variables: Sequence[int], stacked: Sequence[bool]) -> Callable[..., Any]:
    """Return an equation as a function of its variables, mapped over the leading dimension of those that are stacked."""

    def once(*values: Any) -> Any:
        named = dict(zip(variables, values, strict=True))
        operands = [jnp.asarray(a.value, a.tensor.dtype) if isinstance(a, Literal) else named[a] for a in e.operands]
        results = e.primitive.bind(*operands, **e.params)
        return results if e.primitive.multiple_results else [results]

    return jax.vmap(once, in_axes=tuple(0 if s else None for s in stacked))
