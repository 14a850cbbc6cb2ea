"""Unrolling: a scan that takes several steps in a round, or a short one whose steps are written out, so that no loop is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.propagation.nested.programs import nested_body, nests
from unity.transforms.loops.dependences import ScanParts

# Four steps in a round leave a quarter of the kernels that write rows. Eight leave an eighth and need more memory: an LSTM that is
# compiled for an H200 17 and 43 % more than without (`python -m benchmarks.unrolled_loops`).
STEPS = 4
LARGEST = 64  # equations of written-out steps: rewriting the operators of more takes minutes


def unrollable(parts: ScanParts) -> list[Equation]:
    """Return the scan if it can be unrolled: if its steps fill rounds, and it is not unrolled yet."""
    return [parts.scan] if parts.scan.params["unroll"] == 1 and _steps_of_a_round(parts.length) > 1 else []


def add_unrolled(writer: EquationWriter, parts: ScanParts) -> bool:
    """Append the scan, unrolled. Returns whether it can be."""
    scan = parts.scan
    if not unrollable(parts):
        writer.equations.append(scan)
        return False
    params = {**scan.params, "unroll": _steps_of_a_round(parts.length)}
    writer.equations.append(replace(scan, params=params, origin=None))
    return True


def _steps_of_a_round(length: int) -> int:
    """Return the largest number of steps, up to `STEPS`, of which at least two rounds take all steps, or else 1."""
    return max(n for n in range(1, STEPS + 1) if length % n == 0 and (n == 1 or length >= 2 * n))


def short(parts: ScanParts) -> list[Equation]:
    """Return the scan if its steps may be written out: if they are few equations, and it is not unrolled.

    A loop that slices floating-point values is left: these are the weights of layers, whose loop a pipeline divides, or a sequence.
    """
    slices_floats = any(parts.step.tensors[v].floating for v in parts.slices)
    fits = parts.length * max(1, _equations(parts.step)) <= LARGEST
    return [parts.scan] if parts.scan.params["unroll"] == 1 and fits and not slices_floats else []


def add_written_out(writer: EquationWriter, parts: ScanParts) -> bool:
    """Append the steps of a scan, one after the other. Returns False, and appends the scan as it is, if it is not short."""
    if not short(parts):
        writer.equations.append(parts.scan)
        return False
    add_steps(writer, parts)
    return True


def add_steps(writer: EquationWriter, parts: ScanParts) -> None:
    """Append the steps of a scan, one after the other, however many they are."""
    scan, start = parts.scan, parts.constants + parts.carries
    fixed, carry, stacks = scan.operands[: parts.constants], scan.operands[parts.constants : start], scan.operands[start:]
    slices = [writer.trace(lambda x: _rows(x, parts.length), [stack], scan) for stack in stacks]
    emitted: list[Sequence[Atom]] = [()] * parts.length
    for k in reversed(range(parts.length)) if scan.params["reverse"] else range(parts.length):
        outputs = _add_step(writer, parts.step, (*fixed, *carry, *(rows[k] for rows in slices)))
        carry, emitted[k] = outputs[: parts.carries], outputs[parts.carries :]
    writer.aliases.update(zip(scan.results, carry, strict=False))
    for v, values in zip(scan.results[parts.carries :], zip(*emitted, strict=True), strict=True):
        (stack,) = writer.trace(lambda *rows: jnp.stack(rows), values, scan)
        writer.aliases[v] = stack


def _rows(stack: Any, length: int) -> Any:
    """Return the rows of a stack. The gradient of a split is one concatenation."""
    return [lax.squeeze(row, (0,)) for row in lax.split(stack, [1] * length)]


def _add_step(writer: EquationWriter, step: Body, operands: Sequence[Atom]) -> tuple[Atom, ...]:
    """Append the equations of a step on some operands, and return its outputs. Its nested calls get names of their own."""
    atoms, suffix = dict(zip(step.inputs, operands, strict=True)), f".{len(writer.equations)}"

    def renamed(a: Atom) -> Atom:
        return atoms[a] if isinstance(a, int) else a

    for e in step.equations:
        own = replace(e, operands=tuple(map(renamed, e.operands)), results=tuple(writer.new(step.tensors[v]) for v in e.results))
        writer.equations.append(replace(own, group=tuple(call + suffix for call in e.group)))
        atoms.update(zip(e.results, own.results, strict=True))
    return tuple(map(renamed, step.outputs))


def _equations(body: Body) -> int:
    """Return the number of equations of a program and of its nested programs, with short loops in it written out."""
    count = len(body.equations)
    for e in body.equations:
        if nests(e):
            inner = _equations(nested_body(e))
            written_out = e.params.get("length", 1) * inner
            count += written_out if written_out <= LARGEST else inner
    return count
