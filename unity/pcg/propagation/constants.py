"""The constants of a body: its literals, and the variables that depend on no input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unity.pcg.ir.program import Body, Literal
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State


def literal_may_be(literal: Literal, state: State) -> bool:
    """Return whether a literal can be in a state: an array can be partitioned, and only zeros can be partial sums."""
    return state == REPLICATED or (state.kind == "P" and literal.sliceable) or (state == PARTIAL and literal.zero)


@dataclass(frozen=True)
class Constants:
    """The variables of a body that depend on no input, and those among them that are zero.

    read: for each equation the positions at which it reads such variables.
    """

    zero: frozenset[int]
    constant: frozenset[int]
    read: Sequence[Sequence[int]]


CONSTANTS: dict[int, tuple[Body, Constants]] = {}  # a cache by identity: every propagation looks a body up


def constants(body: Body) -> Constants:
    """Return the constants of a body. Zeros may be partial sums; any other constant is not the sum of its copies."""
    cached = CONSTANTS.get(id(body))
    if cached is None or cached[0] is not body:
        zero: set[int] = set()
        constant: set[int] = set()
        for e in body.equations:
            if all(isinstance(a, Literal) or a in constant for a in e.operands):
                constant.update(e.results)
            if facts_of(e.name).moves and all(a.zero if isinstance(a, Literal) else a in zero for a in e.operands):
                zero.update(v for v in e.results if body.tensors[v].additive)
        read = [[p for p, a in enumerate(e.operands) if a in constant] for e in body.equations]
        cached = CONSTANTS[id(body)] = (body, Constants(frozenset(zero), frozenset(constant), read))
    return cached[1]
