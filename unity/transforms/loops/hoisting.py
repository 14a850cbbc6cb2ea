"""Values of a scan's step that are computed before the loop: products and look-ups of all steps at once, and invariants once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unity.pcg.capture.heavy_operators import is_fused_product
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Body, Equation
from unity.pcg.types.factors import facts_of
from unity.transforms.loops.dependences import Dependence, ScanParts, variables_read
from unity.transforms.loops.mapped_steps import MappedSteps
from unity.transforms.loops.scan_parameters import with_step

Targets = Callable[[ScanParts], frozenset[int]]


def products(parts: ScanParts) -> frozenset[int]:
    """Return the products of a step that depend on its slices and on constants alone, and values that take their places.

    A value takes the place of a product that only it reads, such as a product and a bias, if it is not larger: the gradient of the
    bias is one sum then.
    """
    step, targets = parts.step, set[int]()
    for e in step.equations:
        if len(e.results) != 1 or parts.dependences[e.results[0]] != Dependence.SLICES:
            continue
        (v,), operands = e.results, [a for a in e.operands if isinstance(a, int)]
        replaced = [a for a in operands if a in targets and parts.reads[a] == 1]
        smaller = step.tensors[v].nbytes <= sum(step.tensors[a].nbytes for a in replaced)
        heavy = e.name == "dot_general" and not is_fused_product(step, e)
        if heavy or (replaced and smaller):
            targets.add(v)
    return frozenset(targets)


def look_ups(parts: ScanParts) -> frozenset[int]:
    """Return the look-ups of a step in constants, at indices that depend on its slices."""
    reads = (e for e in parts.step.equations if e.name == "gather" and parts.dependences[e.results[0]] == Dependence.SLICES)
    fixed = (e for e in reads if parts.depends(e.operands[0]) == Dependence.CONSTANTS)
    return frozenset(v for e in fixed for v in e.results)


def invariants(parts: ScanParts) -> frozenset[int]:
    """Return the values of a step that depend on constants alone, but for those that only move or convert others.

    Rounded values, such as a product of weights that a step rounds to bfloat16, stay in the loop.
    """
    return frozenset(
        v
        for e in parts.step.equations
        if not facts_of(e.name).moves
        for v in e.results
        if parts.dependences[v] == Dependence.CONSTANTS and v not in parts.literal and not parts.rounded(v)
    )


def needed(parts: ScanParts, targets: Targets) -> list[Equation]:
    """Return the equations of a step that compute targets which the rest of the step reads."""
    variables = _needed(parts, targets(parts))[1]
    return [e for e in parts.step.equations if not set(variables).isdisjoint(e.results)]


def _needed(parts: ScanParts, targets: frozenset[int]) -> tuple[Body, list[int]]:
    """Return a step without the equations of some targets, and without those that only they need; and the targets that it reads."""
    rest = used(replace(parts.step, equations=tuple(e for e in parts.step.equations if targets.isdisjoint(e.results))))
    read = variables_read(rest)
    return rest, [v for e in parts.step.equations for v in e.results if v in targets and v in read]


def add_hoisted(writer: EquationWriter, parts: ScanParts, targets: Targets) -> bool:
    """Append a scan with targets of its step computed before it. Returns False, and appends it as it is, if it reads none."""
    scan, step = parts.scan, parts.step
    rest, hoisted = _needed(parts, targets(parts))
    if not hoisted:
        writer.equations.append(scan)
        return False
    values = MappedSteps.around(writer, parts)
    for e in parts.cone(set(hoisted)):
        values.add(e)
    read = variables_read(rest)
    fixed = {v: values.atoms[v] for v in (*parts.fixed, *hoisted) if v in read and v not in values.stacked}
    slices = {v: values.atoms[v] for v in (*parts.slices, *hoisted) if v in read and v in values.stacked}
    operands = dict(zip(step.inputs, scan.operands, strict=True))
    inputs = (*fixed, *parts.carry, *slices)
    atoms = (*fixed.values(), *(operands[v] for v in parts.carry), *slices.values())
    program = Body(inputs, rest.outputs, rest.equations, rest.tensors)
    params = with_step(scan.params, program, len(fixed), parts.carries)
    writer.equations.append(replace(scan, params=params, operands=atoms, origin=None))
    return True
