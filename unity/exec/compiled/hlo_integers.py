"""Constant folding of small integers in compiled HLO, for all devices at once.

A program computes the branch that a device takes from its `partition-id`, by divisions, comparisons and looking up tables. Values
are arrays with one row for each device, or None for anything that cannot be folded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from unity.exec.compiled.hlo_text import HloInstruction

MOST = 4096  # elements of a value that is folded
Numbers = np.ndarray  # [devices, ...]: the value that each device has
_INTEGERS = {"pred": "bool"} | {f"{k}{bits}": f"{t}{bits}" for k, t in (("s", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_COMPARE: dict[str, Callable[..., Numbers]] = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
}  # fmt: skip
_PLAIN: dict[str, Callable[..., Numbers]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "minimum": np.minimum, "maximum": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "negate": np.negative, "abs": np.abs,
    "sign": np.sign,
    "select": np.where, "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high), "copy": lambda x: x,
}  # fmt: skip


def array_of(type_: str) -> tuple[np.dtype, tuple[int, ...]] | None:
    """Return the element type and shape of a small array of integers or booleans; None for any other type."""
    match = _ARRAY.match(type_)
    if match is None or match[1] not in _INTEGERS:
        return None
    shape = tuple(map(int, match[2].split(","))) if match[2] else ()
    return (np.dtype(_INTEGERS[match[1]]), shape) if prod(shape) <= MOST else None


def constant(instruction: HloInstruction, devices: int) -> Numbers | None:
    """Return the value of a constant, which is equal on every device."""
    kind = array_of(instruction.type)
    words = re.findall(r"true|false|-?\d+", instruction.rest[: instruction.rest.find(")")])
    if kind is None or len(words) != prod(kind[1]):
        return None
    values = [word == "true" if word in ("true", "false") else int(word) for word in words]
    return _on_all(np.array(values).astype(kind[0]).reshape(kind[1]), devices)


def computed(instruction: HloInstruction, operands: Sequence[Numbers], devices: int) -> Numbers | None:
    """Return the value of an instruction from the values of all its operands."""
    kind = array_of(instruction.type)
    if kind is None:
        return None
    dtype, shape = kind
    opcode, goal = instruction.opcode, (devices, *shape)
    if opcode in _PLAIN and len({x.shape for x in operands}) == 1:
        value = _PLAIN[opcode](*operands)
    elif opcode == "compare":
        value = _COMPARE[instruction.attribute(r"direction=(\w+)") or ""](*operands)
    elif opcode in ("divide", "remainder"):
        value = _divided(opcode, *operands)
    elif opcode.startswith("shift-"):
        value = _shifted(opcode, *operands)
    elif opcode in ("convert", "reshape") or (opcode == "bitcast" and operands[0].dtype == dtype):
        value = operands[0].astype(dtype).reshape(goal)
    elif opcode == "broadcast":
        value = _broadcast(operands[0], instruction, goal)
    elif opcode == "dynamic-slice":
        value = _sliced(operands[0], operands[1:], shape)
    elif opcode == "iota":
        dim = int(instruction.attribute(r"iota_dimension=(\d+)") or 0)
        along = np.arange(shape[dim] if shape else 1).reshape([-1 if d == dim else 1 for d in range(max(len(shape), 1))])
        value = _on_all(np.broadcast_to(along, shape), devices)
    else:
        return None
    return None if value is None or value.shape != goal else value.astype(dtype)


def _on_all(value: np.ndarray, devices: int) -> Numbers:
    return np.broadcast_to(value, (devices, *value.shape))


def _divided(opcode: str, x: Numbers, y: Numbers) -> Numbers | None:
    """Divide integers as XLA does: round toward zero, and give a remainder the sign of the dividend."""
    if x.dtype == bool or not y.all():
        return None
    rest = np.fmod(x, y)
    return rest if opcode == "remainder" else (x - rest) // y


def _shifted(opcode: str, x: Numbers, by: Numbers) -> Numbers | None:
    bits = 8 * x.dtype.itemsize
    if x.shape != by.shape or not ((by >= 0) & (by < bits)).all():
        return None
    if opcode == "shift-left":
        return np.left_shift(x, by)
    kind = "i" if opcode == "shift-right-arithmetic" else "u"
    return np.right_shift(x.astype(f"{kind}{x.dtype.itemsize}"), by.astype(f"{kind}{x.dtype.itemsize}"))


def _broadcast(x: Numbers, instruction: HloInstruction, goal: tuple[int, ...]) -> Numbers:
    dims = [int(d) + 1 for d in re.findall(r"\d+", instruction.attribute(r"dimensions=\{([\d,]*)\}") or "")]
    shape = [1] * len(goal)
    shape[0] = goal[0]
    for dim, size in zip(dims, x.shape[1:], strict=True):
        shape[dim] = size
    return np.broadcast_to(x.reshape(shape), goal)  # in HLO dimensions keep their order


def _sliced(x: Numbers, starts: Sequence[Numbers], sizes: tuple[int, ...]) -> Numbers:
    rows = []
    for k, row in enumerate(x):
        at = [min(max(int(s[k]), 0), n - size) for s, n, size in zip(starts, row.shape, sizes, strict=True)]
        rows.append(row[tuple(slice(a, a + size) for a, size in zip(at, sizes, strict=True))])
    return np.stack(rows)
