"""Maps of loops: scans without a carry whose steps have loops, as loops that take the steps of all of these at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp

from unity.pcg.ir.dead_code import descendants
from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Atom, Equation
from unity.transforms.loops.dependences import ScanParts, takes_steps
from unity.transforms.loops.lanes import batched_step, repeated, with_lanes
from unity.transforms.loops.mapped_steps import MappedSteps
from unity.transforms.loops.scan_parameters import with_step


def loops_of_map(parts: ScanParts) -> list[Equation]:
    """Return the loops in the steps of a map if all its steps can be taken at once.

    The results of a step must be distinct and computed in it, as what computes them for all steps gets the names of the map's
    results. A loop's gradient of a constant that the step rounds would be summed over all steps in its narrow type.
    """
    step, loops = parts.step, [e for e in parts.step.equations if takes_steps(e)]
    computed = {v for e in step.equations for v in e.results}
    are_named = len(set(step.outputs)) == len(step.outputs) and computed.issuperset(step.outputs)
    if parts.carries or not are_named or not all(map(_can_have_lanes, map(ScanParts.of, loops))):
        return []
    if any(isinstance(a, int) and parts.rounded(a) for e in loops for a in e.operands):
        return []
    others = (e for e in step.equations if not takes_steps(e))
    return loops if all(map(parts.moves, others)) and _all_vary(parts, loops) else []


def _can_have_lanes(inner: ScanParts) -> bool:
    """Return whether every equation of a loop's step may be applied in all lanes at once."""
    return bool(inner.scan.results) and all(map(inner.moves, inner.step.equations))


def _all_vary(parts: ScanParts, loops: Sequence[Equation]) -> bool:
    """Return whether every loop and every result of a map's step depends on a slice, directly or not."""
    varying = descendants(parts.step, parts.slices)
    return varying.issuperset(parts.step.outputs) and all(varying.issuperset(e.results) for e in loops)


def add_map_at_once(writer: EquationWriter, parts: ScanParts) -> bool:
    """Append the steps of a map, all at once. Returns False, and appends the map as it is, if that cannot be."""
    if not loops_of_map(parts):
        writer.equations.append(parts.scan)
        return False
    names = dict(zip(parts.step.outputs, parts.scan.results, strict=True))
    outside = MappedSteps.around(writer, parts, names)
    for e in parts.step.equations:
        if takes_steps(e):
            _add_lanes(outside, ScanParts.of(e), parts.length)
        else:
            outside.add(e)
    return True


def _add_lanes(outside: MappedSteps, loop: ScanParts, size: int) -> None:
    """Append a loop of a map's step for all steps of the map, each in a lane."""
    scan, slices, writer = loop.scan, loop.constants + loop.carries, outside.writer
    operands, shared = list[Atom](), list[bool]()
    for k, a in enumerate(scan.operands):
        atom, is_stacked = outside.atoms[a] if isinstance(a, int) else a, a in outside.stacked
        if is_stacked and k >= slices:
            (atom,) = writer.trace(lambda x: jnp.moveaxis(x, 0, 1), [atom], scan)
        elif not is_stacked and loop.constants <= k < slices:
            (atom,) = writer.trace(lambda x: repeated(x, size), [atom], scan)
        operands.append(atom)
        shared.append(not is_stacked and not loop.constants <= k < slices)
    params = with_step(scan.params, batched_step(loop, shared, size), loop.constants, loop.carries)
    results = list[int]()
    for k, v in enumerate(scan.results):
        is_named = v in outside.names and k < loop.carries
        results.append(outside.names[v] if is_named else writer.new(with_lanes(outside.tensors[v], int(k >= loop.carries), size)))
    writer.equations.append(replace(scan, params=params, operands=tuple(operands), results=tuple(results), origin=None))
    for k, (v, lanes) in enumerate(zip(scan.results, results, strict=True)):
        if k < loop.carries:
            outside.stack({v: lanes})
        else:
            named = {0: outside.names[v]} if v in outside.names else {}
            (stack,) = writer.trace(lambda x: jnp.moveaxis(x, 1, 0), [lanes], scan, named)
            outside.stack({v: stack})
