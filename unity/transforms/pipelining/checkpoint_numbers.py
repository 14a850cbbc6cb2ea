"""Numbers in the programs of checkpoints, as in `jax.checkpoint(lambda x, w: layer(x, w) * (1 + 0.1 * j))`, as operands.

Checkpoints that differ in these alone are then the same program, applied to different numbers. Numbers that are the same in all of
them stay literals, by which programs simplify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from unity.pcg.ir.program import Atom, Body, Equation, Literal
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED
from unity.pcg.propagation.nested.programs import nested_body

Place = tuple[int, int]  # an equation of a program and an operand of it, by number


def with_numbers_as_operands(body: Body) -> Body:
    """Return a program whose checkpoints that differ in numbers alone have these as operands."""
    alike: dict[tuple[str, str], list[int]] = {}
    for k, e in enumerate(body.equations):
        if e.name in REMATERIALIZED:
            alike.setdefault((_text(e), _outline(nested_body(e))), []).append(k)
    equations = list(body.equations)
    for numbers in alike.values():
        programs = [nested_body(body.equations[k]) for k in numbers]
        places = _differing(programs)
        for k, program in zip(numbers, programs, strict=True):
            equations[k] = _opened(equations[k], program, places) if places else equations[k]
    return replace(body, equations=tuple(equations))


def is_number(a: Atom) -> bool:
    """Return whether an atom is a scalar written into a program, and no random key."""
    return isinstance(a, Literal) and not a.tensor.shape and not jnp.issubdtype(a.tensor.dtype, jax.dtypes.extended)


def _text(e: Equation) -> str:
    """Return the parameters of a checkpoint, without its program, as text."""
    return replace(e, params={name: value for name, value in e.params.items() if name != "jaxpr"}).signature


def _outline(program: Body) -> str:
    """Return a key that is equal for programs that differ in numbers alone."""
    equations = (e.reading(tuple(map(_hidden, e.operands))) for e in program.equations)
    return replace(program, equations=tuple(equations)).key


def _hidden(a: Atom) -> Atom:
    return Literal(np.zeros((), a.tensor.dtype), a.tensor) if isinstance(a, Literal) and is_number(a) else a


def _differing(programs: Sequence[Body]) -> list[Place]:
    """Return the places of numbers that are not the same in all programs."""
    return [
        (k, p)
        for k, equations in enumerate(zip(*(program.equations for program in programs), strict=True))
        for p, atoms in enumerate(zip(*(e.operands for e in equations), strict=True))
        if len({a.key for a in atoms if isinstance(a, Literal)}) > 1
    ]


def _opened(e: Equation, program: Body, places: Sequence[Place]) -> Equation:
    """Return a checkpoint with the numbers in some places of its program as further operands."""
    equations, tensors, start = list(program.equations), dict(program.tensors), max(program.tensors, default=-1) + 1
    numbers = list[Atom]()
    for v, (k, p) in enumerate(places, start):
        operands = equations[k].operands
        numbers.append(operands[p])
        tensors[v] = program.tensor(operands[p])
        equations[k] = equations[k].reading((*operands[:p], v, *operands[p + 1 :]))
    inputs = (*program.inputs, *range(start, start + len(places)))
    opened = Body(inputs, program.outputs, tuple(equations), tensors)
    return replace(e, params={**e.params, "jaxpr": opened}, operands=(*e.operands, *numbers), origin=None)
