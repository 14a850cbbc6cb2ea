"""Nested programs of scans and remats, which become nested graphs: reading and replacing them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED, SCANNED
from unity.pcg.propagation.nested.programs import nested_body


def inside(equation: Equation) -> Body | None:
    """Return the program of a scan or a remat; None for any other equation."""
    return nested_body(equation) if equation.name in SCANNED + REMATERIALIZED else None


def programs(body: Body) -> dict[str, Body]:
    """Return the programs of the scans and remats of a body, but not of those nested deeper, by content hash."""
    nested = (inside(e) for e in body.equations)
    return {program.key: program for program in nested if program is not None}


def ambiguous(body: Body) -> frozenset[str]:
    """Return the content hashes of nested programs that differ in what their functions hide (`Body.identity`)."""
    identities: dict[str, set[tuple[int, ...]]] = {}
    for program in filter(None, map(inside, body.equations)):
        identities.setdefault(program.key, set()).add(program.identity)
    return frozenset(key for key, different in identities.items() if len(different) > 1)


def with_inside(body: Body, instead: Mapping[str, Body]) -> Body:
    """Return a body with the programs of its scans and remats replaced, except `ambiguous` ones.

    Args:
        body: the body.
        instead: the new programs by the content hashes of the old ones.
    """
    if not instead:
        return body
    shared = ambiguous(body)
    others = {key: program for key, program in instead.items() if key not in shared}
    return replace(body, equations=tuple(_with(e, others) for e in body.equations))


def _with(e: Equation, instead: Mapping[str, Body]) -> Equation:
    program = inside(e)
    if program is None or program.key not in instead:
        return e
    return replace(e, params={**e.params, "jaxpr": instead[program.key]}, origin=None)
