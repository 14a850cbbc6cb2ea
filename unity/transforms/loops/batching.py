"""Loops beside each other with equal steps as one loop, which takes the steps of all at once, on operands that are stacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax import lax

from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Atom, Body, Equation, Literal
from unity.transforms.loops.dependences import ScanParts, takes_steps
from unity.transforms.loops.lanes import batched_step, repeated, with_lanes
from unity.transforms.loops.scan_parameters import with_step


def equal_loops(body: Body) -> list[list[ScanParts]]:
    """Return the scans of a program that can be one, not those of nested programs: at least two in each list.

    Their steps are equal, and none depends on another. Of chains of scans with equal steps, the first ones are together, then the
    second ones, and so on.
    """
    classes: dict[tuple, list[ScanParts]] = {}
    for e in body.equations:
        if takes_steps(e) and _batchable(parts := ScanParts.of(e)):
            step = parts.step
            form = step.key, step.identity, parts.constants, parts.carries, parts.length, e.params["unroll"]
            classes.setdefault(form, []).append(parts)
    levels = (level for equal in classes.values() if len(equal) > 1 for level in _levels(body, equal))
    return [level for level in levels if len(level) > 1]


def _batchable(parts: ScanParts) -> bool:
    """Return whether every equation of a step may be applied to several steps at once."""
    return bool(parts.scan.results) and all(map(parts.stepped, parts.step.equations))


def _levels(body: Body, equal: Sequence[ScanParts]) -> list[list[ScanParts]]:
    """Return some scans of a program by the number of them along the longest path that leads to each."""
    chosen, levels = {id(parts.scan): parts for parts in equal}, list[list[ScanParts]]()
    depth = dict[int, int]()
    for e in body.equations:
        above = max((depth.get(a, 0) for a in e.operands if isinstance(a, int)), default=0)
        if id(e) in chosen:
            levels += [[] for _ in range(above + 1 - len(levels))]
            levels[above].append(chosen[id(e)])
            above += 1
        depth |= dict.fromkeys(e.results, above)
    return levels


def with_batched(body: Body, step: str) -> Body:
    """Return a program whose scans over a step are one where they can be; the same object if they cannot."""
    while (loops := next((equal for equal in equal_loops(body) if equal[0].step.key == step), None)) is not None:
        writer = EquationWriter.beside(body)
        scans, late, results = {id(parts.scan) for parts in loops}, list[Equation](), set[int]()
        for e in body.equations:
            if id(e) not in scans and results.isdisjoint(a for a in e.operands if isinstance(a, int)):
                writer.equations.append(e)
                continue
            results.update(e.results)
            if e is loops[-1].scan:
                _add_batched(writer, loops)
                writer.equations += late
                results.clear()
            elif id(e) not in scans:
                late.append(e)
        body = Body(body.inputs, body.outputs, tuple(writer.equations), writer.tensors)
    return body


def _add_batched(writer: EquationWriter, loops: Sequence[ScanParts]) -> None:
    """Append the scan that takes the steps of some loops at once, in the direction of the first one, and their results."""
    first, carries, size = loops[0], loops[0].carries, len(loops)
    scan, slices = first.scan, first.constants + carries
    turned = [parts.scan.params["reverse"] != scan.params["reverse"] for parts in loops]
    operands, shared = list[Atom](), list[bool]()
    for k in range(len(scan.operands)):
        lanes, d = [parts.scan.operands[k] for parts in loops], int(k >= slices)
        turns = turned if d else [False] * size
        same = len({a.key if isinstance(a, Literal) else a for a in lanes}) == 1 and not any(turns)
        shared.append(same and not first.constants <= k < slices)
        if same:
            operands += lanes[:1] if shared[-1] else writer.trace(lambda x: repeated(x, size), lanes[:1], scan)
        else:
            operands += writer.trace(lambda *xs, d=d, turns=turns: _joined(xs, d, turns), lanes, scan)
    results = [writer.new(with_lanes(writer.tensors[v], int(k >= carries), size)) for k, v in enumerate(scan.results)]
    params = with_step(scan.params, batched_step(first, shared, size), first.constants, carries)
    writer.equations.append(replace(scan, params=params, operands=tuple(operands), results=tuple(results), origin=None))
    for k, v in enumerate(results):
        d, names = int(k >= carries), {lane: parts.scan.results[k] for lane, parts in enumerate(loops)}
        turns = turned if d else [False] * size
        writer.trace(lambda x, d=d, turns=turns: _separate(x, d, turns), [v], scan, names)


def _joined(lanes: Sequence[Any], d: int, turned: Sequence[bool]) -> Any:
    """Join values along a new dimension, some of them with their steps in the other order."""
    in_order = (lax.rev(x, (0,)) if turns else x for x, turns in zip(lanes, turned, strict=True))
    return lax.concatenate([lax.expand_dims(x, (d,)) for x in in_order], d)


def _separate(joined: Any, d: int, turned: Sequence[bool]) -> list[Any]:
    """Undo `_joined`. A split's gradient is one concatenation, slices' would be a sum of padded ones."""
    lanes = (lax.squeeze(x, (d,)) for x in lax.split(joined, (1,) * len(turned), d))
    return [lax.rev(x, (0,)) if turns else x for x, turns in zip(lanes, turned, strict=True)]
