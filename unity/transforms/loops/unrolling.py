"""Unrolling: a scan that takes several steps in a round, so that the rows of stacked values are written once a round."""

from __future__ import annotations

from dataclasses import replace

from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Equation
from unity.transforms.loops.dependences import ScanParts

# Four steps in a round leave a quarter of the kernels that write rows. Eight leave an eighth and need more memory: an LSTM that is
# compiled for an H200 17 and 43 % more than without (`python -m benchmarks.unrolled_loops`).
STEPS = 4


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
