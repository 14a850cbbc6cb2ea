"""Removal of the equations of a local program that JAX's public functions insert themselves.

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

WRAPS_STARTS = "wrapped"  # a parameter of slices whose negative starts JAX's function wraps


def simplified(body: Body) -> Body:
    """Return the program with constants in the dtype of their use, and with indices before they were wrapped or clamped."""
    body = _folded(body)
    producers = {v: e for e in body.equations for v in e.results}
    return used(replace(body, equations=tuple(_unwrapped(e, body, producers) for e in body.equations)))


def _folded(body: Body) -> Body:
    """Return the program with converted numbers as constants, and without transposes that undo others.

    A number may be converted before it is cast to vary or, since JAX 0.12, after.
    """
    replacement: dict[int, Atom] = {}
    producers = {v: e for e in body.equations for v in e.results}

    def read(atom: Atom) -> Atom:
        return replacement.get(atom, atom) if isinstance(atom, int) else atom

    equations = []
    for e in body.equations:
        operands = tuple(map(read, e.operands))
        number = through_casts(operands[0], producers) if e.name == "convert_element_type" else None
        if isinstance(number, Literal) and not number.tensor.shape:
            tensor = body.tensors[e.results[0]]
            replacement[e.results[0]] = Literal(np.asarray(number.value).astype(tensor.dtype), tensor)
        elif e.name == CONSTRAIN:
            replacement[e.results[0]] = operands[0]
        elif (original := _undone_transpose(e, operands, producers)) is not None:
            replacement[e.results[0]] = read(original)
        else:
            equations.append(e if operands == e.operands else e.reading(operands))
    return replace(body, equations=tuple(equations), outputs=tuple(map(read, body.outputs)))


def _undone_transpose(e: Equation, operands: tuple[Atom, ...], producers: dict[int, Equation]) -> Atom | None:
    """Return the value that an equation and the transpose before it leave unchanged, or None."""
    first = _producer(operands[0], "transpose", producers) if e.name == "transpose" else None
    if first is None or any(first.params["permutation"][k] != i for i, k in enumerate(e.params["permutation"])):
        return None
    return first.operands[0]


def _unwrapped(e: Equation, body: Body, producers: dict[int, Equation]) -> Equation:
    if e.name == "cond":
        index = branch_before_clamping(e.operands[0], len(e.params["branches"]), producers)
        return e.reading((index, *e.operands[1:]))
    if e.name not in ("dynamic_slice", "dynamic_update_slice"):
        return e
    shape = body.tensor(e.operands[0]).shape
    position = len(e.operands) - len(shape)  # start indices are the last operands, one for each dimension
    starts = [
        a if is_constant(a, producers) else _index_before_wrapping(a, n, producers)
        for a, n in zip(e.operands[position:], shape, strict=True)
    ]
    if any(s is None for s in starts):
        return e
    operands = (*e.operands[:position], *(s for s in starts if s is not None))
    return replace(e, operands=operands, params={**e.params, WRAPS_STARTS: True})


def through_casts(atom: Atom, producers: dict[int, Equation]) -> Atom:
    """Return a value before casts to vary and conversions to its own dtype, such as that of a loop's Python counter."""
    while isinstance(atom, int) and atom in producers and (producers[atom].name == "pvary" or _keeps_dtype(producers[atom])):
        atom = producers[atom].operands[0]
    return atom


def _keeps_dtype(e: Equation) -> bool:
    """Return whether an equation converts to the dtype that its operand has."""
    if e.name != "convert_element_type" or e.origin is None:
        return False
    operand: Any = e.origin.invars[0].aval
    return operand.dtype == e.params["new_dtype"]


def is_constant(atom: Atom, producers: dict[int, Equation]) -> bool:
    """Return whether an atom is a constant, casts left out."""
    return isinstance(through_casts(atom, producers), Literal)


def _index_before_wrapping(start: Atom, n: int, producers: dict[int, Equation]) -> Atom | None:
    """Return `i` if an index is `where(i < 0, i + n, i)`, else None."""
    select = _producer(start, "select_n", producers)
    if select is None or len(select.operands) != 3:
        return None
    predicate, i, wrapped = select.operands
    comparison, addition = _producer(predicate, "lt", producers), _producer(wrapped, "add", producers)
    if comparison is None or addition is None:
        return None
    i, compared, added = (through_casts(a, producers) for a in (i, comparison.operands[0], addition.operands[0]))
    wraps = _is_number(comparison.operands[1], 0, producers) and _is_number(addition.operands[1], n, producers)
    return i if wraps and _is_same(compared, i) and _is_same(added, i) else None


def _is_same(a: Atom, b: Atom) -> bool:
    """Return whether two atoms are one value. Equal numbers at different places are different literals."""
    return a.key == b.key if isinstance(a, Literal) and isinstance(b, Literal) else a == b


def _producer(atom: Atom, name: str, producers: dict[int, Equation]) -> Equation | None:
    """Return the equation that computes a value, before casts, if it is of the named primitive."""
    equation = producers.get(a) if isinstance(a := through_casts(atom, producers), int) else None
    return equation if equation is not None and equation.name == name else None


def _is_number(atom: Atom, value: int, producers: dict[int, Equation]) -> bool:
    literal = through_casts(atom, producers)
    return isinstance(literal, Literal) and not literal.tensor.shape and np.asarray(literal.value).item() == value


def branch_before_clamping(atom: Atom, count: int, producers: dict[int, Equation]) -> Atom:
    """Return a branch index before it was clamped, which JAX does again."""
    while (clamp := _producer(atom, "clamp", producers)) is not None:
        low, inner, high = clamp.operands
        if not (_is_number(low, 0, producers) and _is_number(high, count - 1, producers)):
            break
        atom = inner
    return atom
