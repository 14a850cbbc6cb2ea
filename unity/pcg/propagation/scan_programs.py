"""Programs inside of a program that become graphs inside of its graph: those of scans and remats. Found, and replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.solver import nested_body

SCANNED = ("scan",)
REMATERIALIZED = ("remat2", "checkpoint", "remat")


def inside(equation: Equation) -> Body | None:
    """The program of a scan or a remat; nothing of another equation."""
    return nested_body(equation) if equation.name in SCANNED + REMATERIALIZED else None


def programs(body: Body) -> dict[str, Body]:
    """The programs inside of a body's own scans and remats, by content."""
    found = (inside(e) for e in body.equations)
    return {program.key: program for program in found if program is not None}


def with_inside(body: Body, instead: Mapping[str, Body]) -> Body:
    """The body with other programs inside of its scans and remats: `instead` has them by the content of the old ones."""
    return replace(body, equations=tuple(_with(e, instead) for e in body.equations)) if instead else body


def _with(e: Equation, instead: Mapping[str, Body]) -> Equation:
    program = inside(e)
    if program is None or program.key not in instead:
        return e
    return replace(e, params={**e.params, "jaxpr": instead[program.key]}, origin=None)
