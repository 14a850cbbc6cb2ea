"""Replacement of some of a body's equations by a program."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from unity.base.formatting import short
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Atom, Body, Equation


def spliced(
    body: Body, gone: Collection[int], given: Sequence[Atom], results: Sequence[int], program: Body, named: Equation, scope: str
) -> Body:
    """Return the body with some equations replaced by a program, at the position of the last of them.

    Args:
        body: the body.
        gone: the variables whose equations are replaced.
        given: the variables that the program reads, in its order.
        results: the variables that the program computes.
        program: the program.
        named: the equation whose line and scope the program's equations get.
        scope: a scope below that one, by which the equations can be recognized (`within`).
    """
    start = max(body.tensors) + 1
    same: dict[int, Atom] = {v: start + k for k, v in enumerate(program.tensors)}
    same |= dict(zip(program.inputs, given, strict=True))
    same |= {a: v for a, v in zip(program.outputs, results, strict=True) if isinstance(a, int)}

    def of(a: Atom) -> Atom:
        return same[a] if isinstance(a, int) else a

    def renamed(p: Equation) -> Equation:
        outputs = tuple(v for v in map(of, p.results) if isinstance(v, int))
        place = {"source": named.source, "scope": f"{named.scope}/{scope}", "group": named.group}
        return replace(p, operands=tuple(map(of, p.operands)), results=outputs, **place)

    leaving = [k for k, e in enumerate(body.equations) if set(e.results) & set(gone)]
    remaining = [e for k, e in enumerate(body.equations) if k not in set(leaving)]
    at = leaving[-1] + 1 - len(leaving)
    equations = (*remaining[:at], *map(renamed, program.equations), *remaining[at:])
    tensors = {v: program.tensors[p] for p, v in same.items() if isinstance(v, int)}
    return used(Body(body.inputs, body.outputs, equations, {**tensors, **body.tensors}))


def within(scope: str, called: str) -> bool:
    """Whether a scope is that of equations that `spliced` inserted with the scope `called`."""
    return scope.endswith(f"/{called}")


def variables_of(atoms: Sequence[object]) -> list[int]:
    """Return the variables among atoms."""
    return [a for a in atoms if isinstance(a, int)]


def operator_at(equation: Equation) -> str:
    """Return an equation's primitive and source line, in words."""
    return f"{equation.name} at {short(equation.source)}" if equation.source else equation.name
