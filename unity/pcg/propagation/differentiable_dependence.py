"""Differentiable dependence on inputs, result by result through nested programs.

`unity.pcg.ir.gradient_flow` follows bodies equation by equation, so that a scan's real results all depend on the same. A mask
made of labels that a loop or a checkpoint returns beside the samples would seem to have a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from unity.pcg.ir.gradient_flow import differentiated
from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED, SCANNED
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.propagation.nested_programs import nested_body


@lru_cache(maxsize=1024)
def dependent(body: Body, operands: tuple[bool, ...], inactive: frozenset[int] = frozenset()) -> frozenset[int]:
    """Return the variables that depend differentiably on the marked operands, other than through variables known to be inactive.

    Scans and checkpoints are looked into, as these have nested graphs: what a plan finds active when it runs is decided by
    `Gradients` of its graph. Other equations' real results depend on each operand in which the primitive has a derivative.
    """
    variables = {v for v, flag in zip(body.inputs, operands, strict=True) if flag}
    for e in body.equations:
        flags = _results(e, [isinstance(a, int) and a in variables for a in e.operands], variables)
        variables.update(
            v for v, flag in zip(e.results, flags, strict=True) if flag and body.tensors[v].floating and v not in inactive
        )
    return frozenset(variables)


def _results(e: Equation, operands: Sequence[bool], variables: set[int]) -> Sequence[bool]:
    """Return whether each result of an equation depends on the marked operands, which are its operands among `variables`."""
    if not any(operands):
        return [False] * len(e.results)
    if e.name in SCANNED:
        return _of_scan(e, operands)
    if e.name in REMATERIALIZED:
        return _outputs(nested_body(e), operands)
    return [not variables.isdisjoint(differentiated(e))] * len(e.results)


def _of_scan(e: Equation, operands: Sequence[bool]) -> Sequence[bool]:
    """Return whether each result of a scan depends on the marked operands, in any of its steps."""
    step, (consts, carry) = nested_body(e), constants_and_carry(e.params)
    flags = list(operands)
    while True:
        results = _outputs(step, flags)
        grown = [a or b for a, b in zip(flags[consts : consts + carry], results, strict=False)]
        if grown == flags[consts : consts + carry]:
            return results
        flags[consts : consts + carry] = grown


def _outputs(body: Body, operands: Sequence[bool]) -> list[bool]:
    variables = dependent(body, tuple(operands))
    return [isinstance(a, int) and a in variables for a in body.outputs]
