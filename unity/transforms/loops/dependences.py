"""The parts of a scan, and what each value of its step depends on: constants alone, the step's slices, or the carry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.dead_code import ancestors, used
from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.jaxprs.jaxprs import SCANNED
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.propagation.nested.programs import nested_body
from unity.pcg.propagation.nested.scan_programs import inside
from unity.pcg.types.accumulation import limited, narrow
from unity.pcg.types.factors import facts_of
from unity.substitutions.language.loop_rules import STEPPED


class Dependence(IntEnum):
    """The dependence of a value in a scan's step on the carry and the step, which decides where it can be computed."""

    CONSTANTS = 0  # constants of the loop: once, before it
    SLICES = 1  # slices of the stacked operands, too: for all steps at once, before the loop
    CARRY = 2  # the carry, or an operator that is not moved: in the loop


@dataclass(frozen=True, eq=False)
class ScanParts:
    """A scan with its step.

    Attributes:
        scan: the equation.
        step: the program of a step, whose inputs are constants, carries and slices, in this order.
        constants: the number of constants.
        carries: the number of carries.
    """

    scan: Equation
    step: Body
    constants: int
    carries: int

    @classmethod
    def of(cls, scan: Equation) -> ScanParts:
        """Return the parts of a scan."""
        return cls(scan, used(nested_body(scan)), *constants_and_carry(scan.params))

    @property
    def length(self) -> int:
        """The number of steps."""
        return int(self.scan.params["length"])

    @property
    def fixed(self) -> tuple[int, ...]:
        """The inputs of the step that are constants of the loop."""
        return self.step.inputs[: self.constants]

    @property
    def carry(self) -> tuple[int, ...]:
        """The inputs of the step that are carried."""
        return self.step.inputs[self.constants : self.constants + self.carries]

    @property
    def slices(self) -> tuple[int, ...]:
        """The inputs of the step that are slices of stacked operands."""
        return self.step.inputs[self.constants + self.carries :]

    @cached_property
    def literal(self) -> Mapping[int, int]:
        """The variables of the step that depend on no input at all, each with the number of its equation."""
        return constants(self.step)

    @cached_property
    def reads(self) -> Counter[int]:
        """The number of reads of every variable of the step by its equations and outputs."""
        atoms = (*(e.operands for e in self.step.equations), self.step.outputs)
        return Counter(a for one in atoms for a in one if isinstance(a, int))

    @cached_property
    def dependences(self) -> Mapping[int, Dependence]:
        """The dependence of every variable of the step."""
        depends = dict.fromkeys(self.fixed, Dependence.CONSTANTS)
        depends |= dict.fromkeys(self.carry, Dependence.CARRY) | dict.fromkeys(self.slices, Dependence.SLICES)
        for e in self.step.equations:
            operands = [depends[a] for a in e.operands if isinstance(a, int)]
            level = max(operands, default=Dependence.CONSTANTS) if self.moves(e) else Dependence.CARRY
            depends |= dict.fromkeys(e.results, level)
        return depends

    def depends(self, a: Atom) -> Dependence:
        """Return the dependence of an atom of the step."""
        return self.dependences[a] if isinstance(a, int) else Dependence.CONSTANTS

    def moves(self, e: Equation) -> bool:
        """Return whether an equation may be applied to all steps at once.

        In types of a small range, such as float16, the gradient of a constant could overflow as one sum over all steps. That of a
        rounded constant would be summed over the steps in its narrow type, unless it is a product's operand: that sum is a product.
        """
        variables = [a for a in e.operands if isinstance(a, int)]
        stacked = any(a not in self.constant_widths for a in variables)
        if stacked and e.name != "dot_general" and any(map(self.rounded, variables)):
            return False
        return self.stepped(e) and not any(limited(self.step.tensors[v].dtype) for v in e.results)

    def stepped(self, e: Equation) -> bool:
        """Return whether a lemma is about a single step of an equation, or it is the same in all steps.

        Indices that are promised to be sorted or unique are so in each step alone.
        """
        if e.name == "gather" and (e.params["indices_are_sorted"] or e.params["unique_indices"]):
            return False
        return e.name in STEPPED or facts_of(e.name).pointwise or bool(e.results and e.results[0] in self.literal)

    @cached_property
    def constant_widths(self) -> Mapping[int, int]:
        """The variables of the step that depend on constants alone, each with the size of their widest floating type, in bytes."""
        widths = {v: t.itemsize if (t := self.step.tensors[v]).floating else 0 for v in self.fixed}
        for e in self.step.equations:
            operands = [a for a in e.operands if isinstance(a, int)]
            if all(a in widths for a in operands):
                widths |= dict.fromkeys(e.results, max((widths[a] for a in operands), default=0))
        return widths

    def rounded(self, v: int) -> bool:
        """Return whether a value depends on constants alone and has a narrower floating type than one of them."""
        tensor = self.step.tensors[v]
        return narrow(tensor.dtype) and self.constant_widths.get(v, 0) > tensor.itemsize

    def cone(self, variables: set[int]) -> list[Equation]:
        """Return the equations of the step that some variables depend on, in order."""
        needed = ancestors(self.step, variables)
        return [e for e in self.step.equations if not needed.isdisjoint(e.results)]


def variables_read(body: Body) -> set[int]:
    """Return the variables that a program's equations or outputs read."""
    return {a for atoms in (*(e.operands for e in body.equations), body.outputs) for a in atoms if isinstance(a, int)}


def takes_steps(e: Equation) -> bool:
    """Return whether an equation is a scan that rules of loops may rewrite.

    A scan of no steps computes nothing. A value before it would be computed, and its derivative at zero may be infinite: times the
    cotangent zero that is not a number.
    """
    return e.name in SCANNED and int(e.params["length"]) > 0


def scans(body: Body) -> Iterator[Equation]:
    """Yield the scans that take steps, of a program and of its nested programs of scans and remats, outer ones first."""
    for e in body.equations:
        if takes_steps(e):
            yield e
        program = inside(e)
        if program is not None:
            yield from scans(program)
