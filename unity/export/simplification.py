"""Local programs without the equations that JAX's public functions insert themselves.

Constants are folded to the dtype in which they are used, negative indices and branch numbers lose their wrapping and clamping, and
a transpose that undoes another is dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.graph import CONSTRAIN
from unity.pcg.ir.program import Atom, Body, Equation, Literal

WRAPS_STARTS = "wrapped"  # a parameter of slices whose starts JAX's function wraps again


def simplified(body: Body) -> Body:
    """Return the program with constants in the dtype of their use, and with indices before they were wrapped or clamped."""
    body = _folded(body)
    maker = {v: e for e in body.equations for v in e.results}
    return used(replace(body, equations=tuple(_unwrapped(e, body, maker) for e in body.equations)))


def _folded(body: Body) -> Body:
    """Return the program with converted numbers as constants, and without transposes that undo others.

    A number may be converted before it is cast to vary or, since JAX 0.12, after.
    """
    replacement: dict[int, Atom] = {}
    maker = {v: e for e in body.equations for v in e.results}

    def read(atom: Atom) -> Atom:
        return replacement.get(atom, atom) if isinstance(atom, int) else atom

    equations = []
    for e in body.equations:
        operands = tuple(map(read, e.operands))
        number = through_casts(operands[0], maker) if e.name == "convert_element_type" else None
        if isinstance(number, Literal) and not number.tensor.shape:
            tensor = body.tensors[e.results[0]]
            replacement[e.results[0]] = Literal(np.asarray(number.value).astype(tensor.dtype), tensor)
        elif e.name == CONSTRAIN:
            replacement[e.results[0]] = operands[0]
        elif (original := _undone_transpose(e, operands, maker)) is not None:
            replacement[e.results[0]] = read(original)
        else:
            equations.append(e if operands == e.operands else e.reading(operands))
    return replace(body, equations=tuple(equations), outputs=tuple(map(read, body.outputs)))


def _undone_transpose(e: Equation, operands: tuple[Atom, ...], maker: dict[int, Equation]) -> Atom | None:
    """Return the value that an equation and the transpose before it leave unchanged, or None."""
    first = _maker(operands[0], "transpose", maker) if e.name == "transpose" else None
    if first is None or any(first.params["permutation"][k] != i for i, k in enumerate(e.params["permutation"])):
        return None
    return first.operands[0]


def _unwrapped(e: Equation, body: Body, maker: dict[int, Equation]) -> Equation:
    if e.name == "cond":
        index = branch_before_clamping(e.operands[0], len(e.params["branches"]), maker)
        return e.reading((index, *e.operands[1:]))
    if e.name not in ("dynamic_slice", "dynamic_update_slice"):
        return e
    shape = body.tensor(e.operands[0]).shape
    position = len(e.operands) - len(shape)  # start indices are the last operands, one for each dimension
    starts = [
        a if is_constant(a, maker) else _index_before_wrapping(a, n, maker)
        for a, n in zip(e.operands[position:], shape, strict=True)
    ]
    if any(s is None for s in starts):
        return e
    operands = (*e.operands[:position], *(s for s in starts if s is not None))
    return replace(e, operands=operands, params={**e.params, WRAPS_STARTS: True})


def through_casts(atom: Atom, maker: dict[int, Equation]) -> Atom:
    """Return the value before casts to vary and conversions to the dtype that it has, such as of a loop's Python counter."""
    while isinstance(atom, int) and atom in maker and (maker[atom].name == "pvary" or _keeps_dtype(maker[atom])):
        atom = maker[atom].operands[0]
    return atom


def _keeps_dtype(e: Equation) -> bool:
    """Return whether an equation converts to the dtype that its operand has."""
    if e.name != "convert_element_type" or e.origin is None:
        return False
    operand: Any = e.origin.invars[0].aval
    return operand.dtype == e.params["new_dtype"]


def is_constant(atom: Atom, maker: dict[int, Equation]) -> bool:
    """Return whether an atom is a constant, casts left out."""
    return isinstance(through_casts(atom, maker), Literal)


def _index_before_wrapping(start: Atom, n: int, maker: dict[int, Equation]) -> Atom | None:
    """Return `i` if an index is `where(i < 0, i + n, i)`, else None."""
    select = _maker(start, "select_n", maker)
    if select is None or len(select.operands) != 3:
        return None
    predicate, i, wrapped = select.operands
    comparison, addition, i = _maker(predicate, "lt", maker), _maker(wrapped, "add", maker), through_casts(i, maker)
    if comparison is None or addition is None:
        return None
    is_one_index = through_casts(comparison.operands[0], maker) == i == through_casts(addition.operands[0], maker)
    return (
        i if is_one_index and _is_number(comparison.operands[1], 0, maker) and _is_number(addition.operands[1], n, maker) else None
    )


def _maker(atom: Atom, name: str, maker: dict[int, Equation]) -> Equation | None:
    """Return the equation that computes a value, casts left out, if it is of some primitive."""
    equation = maker.get(a) if isinstance(a := through_casts(atom, maker), int) else None
    return equation if equation is not None and equation.name == name else None


def _is_number(atom: Atom, value: int, maker: dict[int, Equation]) -> bool:
    literal = through_casts(atom, maker)
    return isinstance(literal, Literal) and not literal.tensor.shape and np.asarray(literal.value).item() == value


def branch_before_clamping(atom: Atom, count: int, maker: dict[int, Equation]) -> Atom:
    """Return a branch index before it was clamped, which JAX does again."""
    while (clamp := _maker(atom, "clamp", maker)) is not None:
        low, inner, high = clamp.operands
        if not (_is_number(low, 0, maker) and _is_number(high, count - 1, maker)):
            break
        atom = inner
    return atom
