"""Check of a plan's derivation: every step from the captured program to the parallel graph is replayed or verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unity.base.errors import DerivationError
from unity.pcg.parallel.check import check
from unity.pcg.parallel.serial_view import erased
from unity.substitutions.language.derivation import RewriteStep

if TYPE_CHECKING:
    from unity.plan.face.planned_program import PlannedProgram


def check_derivation(program: PlannedProgram) -> tuple[RewriteStep, ...]:
    """Verify the whole derivation of a plan's program, and return the steps that rewrote the captured program.

    Raises DerivationError, naming the first step that does not hold.
    """
    for transformation in program.transformations:
        transformation.check()
    check(program.pcg)
    if erased(program.pcg).key != program.serial.key:
        raise DerivationError("the parallel graph without its parallelization operators is not the graph that was derived")
    program.check_parallelization()
    return program.rewriting.derivation.every
