"""Sums of products over steps: a carry that only adds up a product of each step is one contraction of all steps, after the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jax import lax

from unity.pcg.capture.heavy_operators import multiplies
from unity.pcg.capture.value_numbering import deduplicated
from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.types.accumulation import limited
from unity.transforms.loops.dependences import Dependence, ScanParts
from unity.transforms.loops.scan_parameters import add_emitting


@dataclass(frozen=True, eq=False)
class AddedValue:
    """A carry, by number, to which each step only adds a value, with the variable of this and the equation of the addition."""

    number: int
    value: int
    addition: Equation


@dataclass(frozen=True, eq=False)
class SummedProduct:
    """A carry, by number, to which each step only adds a product, with the equation of the product."""

    number: int
    product: Equation

    @property
    def operands(self) -> tuple[int, int]:
        """The operands of the product, variables of the step."""
        left, right = (a for a in self.product.operands if isinstance(a, int))
        return left, right


def added_values(parts: ScanParts) -> list[AddedValue]:
    """Return the carries of a scan to which each step only adds a value of their type.

    In types of a small range, such as float16, the sum of all steps in another order could overflow.
    """
    step, reads = parts.step, parts.reads
    producers = {v: e for e in step.equations for v in e.results}
    values = []
    for k, (carry, output) in enumerate(zip(parts.carry, step.outputs, strict=False)):
        if not isinstance(output, int) or (addition := producers.get(output)) is None:
            continue
        if addition.name not in ("add", "add_any") or reads[carry] != 1 or reads[output] != 1:
            continue
        added = [a for a in addition.operands if isinstance(a, int) and a != carry]
        same = len(added) == 1 and carry in addition.operands and step.tensors[added[0]] == step.tensors[carry]
        if same and not limited(step.tensors[carry].dtype):
            values.append(AddedValue(k, added[0], addition))
    return values


def summed_products(parts: ScanParts) -> list[SummedProduct]:
    """Return the carries of a scan that only add up a product of each step, of two values that change from step to step."""
    step, reads = parts.step, parts.reads
    producers = {v: e for e in step.equations for v in e.results}
    sums = []
    for added in added_values(parts):
        product = producers.get(added.value)
        if product is None or product.name != "dot_general" or multiplies(product) or reads[added.value] != 1:
            continue
        levels = [parts.dependences[a] for a in product.operands if isinstance(a, int)]
        varies = len(levels) == 2 and Dependence.CONSTANTS not in levels
        if varies and not any(limited(step.tensor(a).dtype) for a in product.operands):
            sums.append(SummedProduct(added.number, product))
    return sums


def add_with_sums(writer: EquationWriter, parts: ScanParts) -> bool:
    """Append a scan without the carries that only add up products, and a contraction over all steps for each.

    Returns False, and appends the scan as it is, if it has no such carry.
    """
    scan, step, sums = parts.scan, parts.step, summed_products(parts)
    if not sums:
        writer.equations.append(scan)
        return False
    removed = {s.number for s in sums}
    remaining = [k for k in range(len(step.outputs)) if k not in removed]
    factors = [v for s in sums for v in s.operands]
    outputs = (*(step.outputs[k] for k in remaining), *factors)
    merged = deduplicated(Body(step.inputs, outputs, step.equations, step.tensors))  # equal factors are emitted once
    shared, same = merged.outputs[: len(remaining)], dict(zip(factors, merged.outputs[len(remaining) :], strict=True))
    operands = dict(zip(step.inputs, scan.operands, strict=True))
    stacked: dict[Atom, Atom] = {
        a: scan.results[k] for k, a in zip(remaining, shared, strict=True) if k >= parts.carries and isinstance(a, int)
    }
    stacked |= {v: operands[v] for v in parts.slices}
    emitted = [v for v in dict.fromkeys(same.values()) if isinstance(v, int) and v not in stacked]
    carry = tuple(v for k, v in enumerate(parts.carry) if k not in removed)
    rest = replace(merged, outputs=shared)
    stacked |= add_emitting(writer, parts, rest, carry, [scan.results[k] for k in remaining], emitted)
    for s in sums:
        atoms = (*(stacked[same[v]] for v in s.operands), operands[parts.carry[s.number]])
        writer.trace(_contraction(s.product), atoms, s.product, {0: scan.results[s.number]})
    return True


def _contraction(product: Equation) -> Callable[..., Any]:
    """Return the sum of an initial value and of a product of each step, as a function of all steps' operands and that value."""
    ((cx, cy), (bx, by)) = product.params["dimension_numbers"]
    numbers = ((0, *(d + 1 for d in cx)), (0, *(d + 1 for d in cy))), ([d + 1 for d in bx], [d + 1 for d in by])
    others = {name: product.params[name] for name in ("precision", "preferred_element_type")}

    def run(left: Any, right: Any, initial: Any) -> Any:
        return lax.add(initial, lax.dot_general(left, right, numbers, **others))

    return run
