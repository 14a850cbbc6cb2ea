"""Trip counts of the loops of compiled HLO.

XLA writes `known_trip_count` beside the loops that it could count. For other loops, the trip count is derived from a condition that
compares two values, each of which has a known first value and a known increment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from unity.exec.compiled.hlo_text import Computation, HloInstruction, HloModule

_KNOWN = r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)'
_SAME_VALUE = ("copy", "bitcast", "convert")


@dataclass(frozen=True)
class _Scope:
    """A computation, with its caller's scope and the name of the argument for each parameter; None if the caller is unknown."""

    computation: Computation
    arguments: tuple[tuple[_Scope, str], ...] | None = None


@dataclass(frozen=True)
class _Sum:
    """A symbolic integer: field `field` of the tuple that the loop carries (None: no field), plus `offset`."""

    field: int | None
    offset: int


def trip_count(module: HloModule, computation: Computation, loop: HloInstruction) -> int | None:
    """Return the number of times that the body of `loop`, a `while` of `computation`, runs; None if the text does not tell."""
    known = loop.attribute(_KNOWN)
    if known is not None:
        return int(known)
    condition = _Scope(module.computations[loop_part(loop, "condition")])
    scope, test = _resolve(module, condition, condition.computation.root)
    if test.opcode != "compare":
        return None
    left, right = (_progression(module, computation, loop, _value(module, scope, name)) for name in test.operands)
    if left is None or right is None:
        return None
    return _runs(test.attribute(r"direction=(\w+)"), left[0] - right[0], left[1] - right[1])


def loop_part(loop: HloInstruction, part: str) -> str:
    """Return the name of the computation that is the `"body"` or the `"condition"` of a `while`."""
    name = loop.attribute(rf"{part}=%?([^\s,]+)")
    if name is None:
        raise ValueError(f"HLO loop {loop.name} names no {part}: is the text cut?")
    return name


def _runs(direction: str | None, start: int, step: int) -> int | None:
    """Return the smallest t >= 0 for which `start + t * step` does not compare to 0 as `direction`; None without such a t."""
    if direction == "NE":
        if step == 0 or -start % step:
            return 0 if start == 0 else None
        return -start // step if -start // step >= 0 else None
    if direction in ("GT", "GE"):
        direction, start, step = {"GT": "LT", "GE": "LE"}[direction], -start, -step
    if direction == "LE":
        direction, start = "LT", start - 1
    if direction != "LT":
        return None
    if start >= 0:
        return 0
    return -(start // step) if step > 0 else None


def _progression(module: HloModule, computation: Computation, loop: HloInstruction, side: _Sum | None) -> tuple[int, int] | None:
    """Return a value of the condition as (first value, increment in every round); None if that is unknown."""
    if side is None or side.field is None:
        return (side.offset, 0) if side else None
    body = _Scope(module.computations[loop_part(loop, "body")])
    first = _field(module, _Scope(computation), loop.operands[0], side.field)
    following = _field(module, body, body.computation.root, side.field)
    if first is None or following is None or first.field is not None or following.field != side.field:
        return None
    return first.offset + side.offset, following.offset


def _field(module: HloModule, scope: _Scope, name: str, index: int) -> _Sum | None:
    scope, tuple_ = _resolve(module, scope, name)
    return _value(module, scope, tuple_.operands[index]) if tuple_.opcode == "tuple" else None


def _value(module: HloModule, scope: _Scope, name: str) -> _Sum | None:
    """Return a value as a carried field plus a constant, or None if it has another form."""
    scope, instruction = _resolve(module, scope, name)
    if instruction.opcode == "constant":
        literal = re.fullmatch(r"-?\d+", instruction.operands[0]) if instruction.operands else None
        return _Sum(None, int(literal[0])) if literal else None
    if instruction.opcode == "get-tuple-element":
        owner = _resolve(module, scope, instruction.operands[0])[1]
        return _Sum(_index(instruction), 0) if owner.opcode == "parameter" else None
    if instruction.opcode not in ("add", "subtract"):
        return None
    left, right = (_value(module, scope, operand) for operand in instruction.operands)
    if left is None or right is None:
        return None
    if instruction.opcode == "subtract":
        return _Sum(left.field, left.offset - right.offset) if right.field is None else None
    if left.field is not None and right.field is not None:
        return None
    return _Sum(right.field if left.field is None else left.field, left.offset + right.offset)


def _resolve(module: HloModule, scope: _Scope, name: str) -> tuple[_Scope, HloInstruction]:
    """Return the instruction that computes a value: through copies and tuples, into fusions and calls, out to callers' operands."""
    instruction = scope.computation.instructions[name]
    if instruction.opcode in _SAME_VALUE:
        return _resolve(module, scope, instruction.operands[0])
    if instruction.opcode in ("fusion", "call"):
        callee = module.computations[instruction.callees()[0]]
        inner = _Scope(callee, tuple((scope, operand) for operand in instruction.operands))
        return _resolve(module, inner, callee.root)
    if instruction.opcode == "parameter" and scope.arguments is not None:
        caller, argument = scope.arguments[int(instruction.operands[0])]
        return _resolve(module, caller, argument)
    if instruction.opcode == "get-tuple-element":
        owner, tuple_ = _resolve(module, scope, instruction.operands[0])
        if tuple_.opcode == "tuple":
            return _resolve(module, owner, tuple_.operands[_index(instruction)])
    return scope, instruction


def _index(instruction: HloInstruction) -> int:
    return int(instruction.attribute(r"index=(\d+)") or 0)
