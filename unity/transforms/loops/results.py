"""Results of a scan that no later step reads: their products, and all that is computed from these, are taken after the loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax.numpy as jnp

from unity.pcg.capture.heavy_operators import is_fused_product
from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Equation
from unity.pcg.types.accumulation import narrow
from unity.transforms.loops.dependences import Dependence, ScanParts
from unity.transforms.loops.mapped_steps import MappedSteps
from unity.transforms.loops.scan_parameters import add_emitting
from unity.transforms.loops.sums import AddedValue, added_values


def totals(parts: ScanParts) -> list[AddedValue]:
    """Return the carries of a scan that only add up a floating value of each step, such as a loss, in at least 32 bits.

    Sums of products are left to the rule about them.
    """
    products = {v for e in parts.step.equations if e.name == "dot_general" for v in e.results}
    wide = {v for v, t in parts.step.tensors.items() if t.floating and not narrow(t.dtype)}
    return [a for a in added_values(parts) if a.value in wide - products]


def final_equations(parts: ScanParts) -> list[Equation]:
    """Return the equations of a step that compute results from products which no carry depends on but a sum of them, in order.

    These are the products of values that depend on the carry, and all that depends on them. Each can be applied to all steps at
    once. A product stays in the loop if anything that depends on it has to.
    """
    step, sums = parts.step, totals(parts)
    times = Counter(a for a in step.outputs if isinstance(a, int))
    summed = {a.number for a in sums}
    staying = {
        a for k, a in enumerate(step.outputs) if isinstance(a, int) and k not in summed and (k < parts.carries or times[a] > 1)
    }
    free, additions = set[int](), {v for a in sums for v in a.addition.results}
    for e in reversed(step.equations):
        if not additions.isdisjoint(e.results):
            continue
        if parts.moves(e) and staying.isdisjoint(e.results):
            free.update(e.results)
        else:
            staying.update(a for a in e.operands if isinstance(a, int))
    final, computed = list[Equation](), set[int]()
    for e in step.equations:
        product = e.name == "dot_general" and not is_fused_product(step, e) and parts.dependences[e.results[0]] == Dependence.CARRY
        if free.issuperset(e.results) and (product or any(a in computed for a in e.operands)):
            final.append(e)
            computed.update(e.results)
    return final


def add_with_final_results(writer: EquationWriter, parts: ScanParts) -> bool:
    """Append a scan that returns what its final equations read, these equations for all steps at once, and sums over the steps.

    Returns False, and appends the scan as it is, if it has no such equations.
    """
    scan, step, final = parts.scan, parts.step, final_equations(parts)
    if not final:
        writer.equations.append(scan)
        return False
    computed = {v for e in final for v in e.results}
    names = {a: v for a, v in zip(step.outputs, scan.results, strict=True) if a in computed}
    sums = [a for a in totals(parts) if a.value in computed]
    summed = {a.number for a in sums}
    remaining = [k for k, a in enumerate(step.outputs) if a not in computed and k not in summed]
    carry = [v for k, v in enumerate(parts.carry) if k not in summed]
    read = list(dict.fromkeys(a for e in final for a in e.operands if isinstance(a, int) and a not in computed))
    outside = MappedSteps.around(writer, parts, names)
    outside.stack({a: scan.results[k] for k in remaining if k >= parts.carries and isinstance(a := step.outputs[k], int)})
    emitted = [v for v in read if parts.dependences[v] == Dependence.CARRY and v not in outside.stacked]
    rest = replace(step, outputs=tuple(step.outputs[k] for k in remaining))
    outside.stack(add_emitting(writer, parts, rest, carry, [scan.results[k] for k in remaining], emitted))
    before = parts.cone({v for v in read if parts.dependences[v] != Dependence.CARRY and v not in outside.stacked})
    for e in (*before, *final):
        outside.add(e)
    initial = dict(zip(parts.carry, scan.operands[parts.constants :], strict=False))
    for a in sums:
        atoms = initial[parts.carry[a.number]], outside.atoms[a.value]
        writer.trace(lambda first, values: first + jnp.sum(values, 0), atoms, a.addition, {0: scan.results[a.number]})
    return True
