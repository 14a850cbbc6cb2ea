"""Puts a program in the place of some of a body's equations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Atom, Body, Equation


def spliced(
    body: Body, gone: Collection[int], given: Sequence[Atom], results: Sequence[int], program: Body, named: Equation, scope: str
) -> Body:
    """The body, its equations that make what is `gone` replaced by a program, where the last of them stood.

    Args:
        body: the whole.
        gone: variables whose equations go.
        given: what the program reads, in its order.
        results: what it makes.
        program: what comes instead.
        named: whose line its equations have, and in whose scope they are.
        scope: what they are called there, so that they can be told from others (`within`).
    """
    start = max(body.tensors) + 1
    same: dict[int, Atom] = {v: start + k for k, v in enumerate(program.tensors)}
    same |= dict(zip(program.inputs, given, strict=True))
    same |= {a: v for a, v in zip(program.outputs, results, strict=True) if isinstance(a, int)}

    def of(a: Atom) -> Atom:
        return same[a] if isinstance(a, int) else a

    def made(p: Equation) -> Equation:
        found = tuple(v for v in map(of, p.results) if isinstance(v, int))
        place = {"source": named.source, "scope": f"{named.scope}/{scope}", "group": named.group}
        return replace(p, operands=tuple(map(of, p.operands)), results=found, **place)

    leaving = [k for k, e in enumerate(body.equations) if set(e.results) & set(gone)]
    kept = [e for k, e in enumerate(body.equations) if k not in set(leaving)]
    at = leaving[-1] + 1 - len(leaving)
    equations = (*kept[:at], *map(made, program.equations), *kept[at:])
    tensors = {v: program.tensors[p] for p, v in same.items() if isinstance(v, int)}
    return used(Body(body.inputs, body.outputs, equations, {**tensors, **body.tensors}))


def within(scope: str, called: str) -> bool:
    """Whether a scope is that of what `spliced` put there under this name."""
    return scope.endswith(f"/{called}")
