"""Results of a scan that no later step reads: their products, and all that is computed from these, are taken after the loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from unity.pcg.capture.heavy_operators import is_fused_product
from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Equation
from unity.transforms.loops.dependences import Dependence, ScanParts
from unity.transforms.loops.hoisting import Outside
from unity.transforms.loops.scan_parameters import add_emitting


def final_equations(parts: ScanParts) -> list[Equation]:
    """Return the equations of a step that compute results from products which no carry depends on, in order.

    These are the products of values that depend on the carry, and all that depends on them. Each can be applied to all steps at
    once. A product stays in the loop if anything that depends on it has to.
    """
    step = parts.step
    times = Counter(a for a in step.outputs if isinstance(a, int))
    staying = {a for k, a in enumerate(step.outputs) if isinstance(a, int) and (k < parts.carries or times[a] > 1)}
    free = set[int]()
    for e in reversed(step.equations):
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
    """Append a scan that returns what its final equations read, and these equations for all steps at once.

    Returns False, and appends the scan as it is, if it has no such equations.
    """
    scan, step, final = parts.scan, parts.step, final_equations(parts)
    if not final:
        writer.equations.append(scan)
        return False
    computed = {v for e in final for v in e.results}
    names = {a: v for a, v in zip(step.outputs, scan.results, strict=True) if a in computed}
    kept = [k for k, a in enumerate(step.outputs) if a not in computed]
    read = list(dict.fromkeys(a for e in final for a in e.operands if isinstance(a, int) and a not in computed))
    outside = Outside(writer, parts, names)
    outside.stack({a: scan.results[k] for k in kept if k >= parts.carries and isinstance(a := step.outputs[k], int)})
    emitted = [v for v in read if parts.dependences[v] == Dependence.CARRY and v not in outside.stacked]
    rest = replace(step, outputs=tuple(step.outputs[k] for k in kept))
    outside.stack(add_emitting(writer, parts, rest, parts.carry, [scan.results[k] for k in kept], emitted))
    before = parts.cone({v for v in read if parts.dependences[v] != Dependence.CARRY and v not in outside.stacked})
    for e in (*before, *final):
        outside.add(e)
    return True
