"""The application of rules of loops by name, to the scans of a program and of its nested programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.scan_programs import inside
from unity.substitutions.language.loop_rules import INVARIANTS, JOINED, LOOK_UPS, PRODUCTS, RESULTS, SUMS, LoopRule
from unity.transforms.loops.dependences import ScanParts, takes_steps
from unity.transforms.loops.hoisting import add_hoisted, invariants, look_ups, needed, products
from unity.transforms.loops.joined import add_with_parts, joined_products
from unity.transforms.loops.results import add_with_final_results, final_equations
from unity.transforms.loops.sums import add_with_sums, summed_products


@dataclass(frozen=True)
class _Way:
    """How a rule is applied to a scan.

    Attributes:
        moved: returns the equations of the step that the rule changes or moves, without those that these depend on.
        add: appends the scan after the rule, and the equations that left it. Returns False if it appends the scan as it is.
    """

    moved: Callable[[ScanParts], list[Equation]]
    add: Callable[[EquationWriter, ScanParts], bool]


WAYS: Mapping[str, _Way] = {
    JOINED.name: _Way(lambda parts: [j.product for j in joined_products(parts)], add_with_parts),
    LOOK_UPS.name: _Way(partial(needed, targets=look_ups), partial(add_hoisted, targets=look_ups)),
    PRODUCTS.name: _Way(partial(needed, targets=products), partial(add_hoisted, targets=products)),
    INVARIANTS.name: _Way(partial(needed, targets=invariants), partial(add_hoisted, targets=invariants)),
    SUMS.name: _Way(lambda parts: [s.product for s in summed_products(parts)], add_with_sums),
    RESULTS.name: _Way(final_equations, add_with_final_results),
}


def moved(parts: ScanParts, rule: LoopRule) -> list[Equation]:
    """Return the equations of a step that a rule changes or moves out of the loop, without those that these depend on."""
    return WAYS[rule.name].moved(parts)


def applied(body: Body, rule: LoopRule, step: str) -> Body:
    """Return a program with a rule applied to all scans whose steps have a content hash, at any depth of scans and remats.

    Returns the same object if it applies to none.
    """
    writer, changed = EquationWriter.beside(body), False
    for e in body.equations:
        program = inside(e)
        parts = ScanParts.of(e) if takes_steps(e) else None
        if parts is not None and parts.step.key == step:
            changed = WAYS[rule.name].add(writer, parts) or changed
            continue
        new = None if program is None else applied(program, rule, step)
        if new is not program:
            e, changed = replace(e, params={**e.params, "jaxpr": new}, origin=None), True
        writer.equations.append(e)
    return Body(body.inputs, body.outputs, tuple(writer.equations), writer.tensors) if changed else body
