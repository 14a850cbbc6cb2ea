"""A local program without what JAX's public functions do by themselves: constants converted, negative indices wrapped, numbers of
branches clamped, dimensions turned and turned back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.graph import CONSTRAIN
from unity.pcg.ir.program import Atom, Body, Equation, Literal

WRAPPED = "wrapped"  # marks a slice whose starts JAX wraps again
SLICES = {"dynamic_slice": 1, "dynamic_update_slice": 2}  # where their starts begin


def simplified(body: Body) -> Body:
    """The program with constants as they are used, and indices as they were before they were wrapped or clamped."""
    body = _folded(body)
    maker = {v: e for e in body.equations for v in e.results}
    return used(replace(body, equations=tuple(_unwrapped(e, body, maker) for e in body.equations)))


def _folded(body: Body) -> Body:
    """The program with numbers converted to the type in which they are used, be it before they vary or (JAX 0.12) after; what turns
    dimensions back is gone."""
    found: dict[int, Atom] = {}
    maker = {v: e for e in body.equations for v in e.results}

    def read(atom: Atom) -> Atom:
        return found.get(atom, atom) if isinstance(atom, int) else atom

    kept = []
    for e in body.equations:
        operands = tuple(map(read, e.operands))
        only = through(operands[0], maker) if e.name == "convert_element_type" else None
        if isinstance(only, Literal) and not only.tensor.shape:
            tensor = body.tensors[e.results[0]]
            found[e.results[0]] = Literal(np.asarray(only.value).astype(tensor.dtype), tensor)
        elif e.name == CONSTRAIN:
            found[e.results[0]] = operands[0]
        elif (turned := _turned_back(e, operands, maker)) is not None:
            found[e.results[0]] = read(turned)
        else:
            kept.append(e if operands == e.operands else e.reading(operands))
    return replace(body, equations=tuple(kept), outputs=tuple(map(read, body.outputs)))


def _turned_back(e: Equation, operands: tuple[Atom, ...], maker: dict[int, Equation]) -> Atom | None:
    """Whose dimensions are turned and turned back."""
    first = _made(operands[0], "transpose", maker) if e.name == "transpose" else None
    if first is None or any(first.params["permutation"][k] != i for i, k in enumerate(e.params["permutation"])):
        return None
    return first.operands[0]


def _unwrapped(e: Equation, body: Body, maker: dict[int, Equation]) -> Equation:
    if e.name == "cond":
        index = index_of_branch(e.operands[0], len(e.params["branches"]), maker)
        return e.reading((index, *e.operands[1:]))
    if e.name not in SLICES:
        return e
    first, shape = SLICES[e.name], body.tensor(e.operands[0]).shape
    starts = [a if constant(a, maker) else _before(a, n, maker) for a, n in zip(e.operands[first:], shape, strict=True)]
    if any(s is None for s in starts):
        return e
    operands = (*e.operands[:first], *(s for s in starts if s is not None))
    return replace(e, operands=operands, params={**e.params, WRAPPED: True})


def through(atom: Atom, maker: dict[int, Equation]) -> Atom:
    """What was made to vary, or to be of the type that it has anyway: a loop's counter that began as Python's number, say."""
    while isinstance(atom, int) and atom in maker and (maker[atom].name == "pvary" or _of_its_type(maker[atom])):
        atom = maker[atom].operands[0]
    return atom


def _of_its_type(e: Equation) -> bool:
    """Whether a conversion is to the type that its operand has."""
    if e.name != "convert_element_type" or e.origin is None:
        return False
    operand: Any = e.origin.invars[0].aval
    return operand.dtype == e.params["new_dtype"]


def constant(atom: Atom, maker: dict[int, Equation]) -> bool:
    """Whether an atom is a constant."""
    return isinstance(through(atom, maker), Literal)


def _before(start: Atom, n: int, maker: dict[int, Equation]) -> Atom | None:
    """i, of `where(i < 0, i + n, i)`."""
    select = _made(start, "select_n", maker)
    if select is None or len(select.operands) != 3:
        return None
    which, i, wrapped = select.operands
    below, plus, i = _made(which, "lt", maker), _made(wrapped, "add", maker), through(i, maker)
    if below is None or plus is None:
        return None
    same = through(below.operands[0], maker) == i == through(plus.operands[0], maker)
    return i if same and _is(below.operands[1], 0, maker) and _is(plus.operands[1], n, maker) else None


def _made(atom: Atom, by: str, maker: dict[int, Equation]) -> Equation | None:
    found = maker.get(a) if isinstance(a := through(atom, maker), int) else None
    return found if found is not None and found.name == by else None


def _is(atom: Atom, value: int, maker: dict[int, Equation]) -> bool:
    found = through(atom, maker)
    return isinstance(found, Literal) and not found.tensor.shape and np.asarray(found.value).item() == value


def index_of_branch(atom: Atom, count: int, maker: dict[int, Equation]) -> Atom:
    """A branch's number before it was clamped, which JAX does again."""
    while (clamp := _made(atom, "clamp", maker)) is not None:
        low, inner, high = clamp.operands
        if not (_is(low, 0, maker) and _is(high, count - 1, maker)):
            break
        atom = inner
    return atom
