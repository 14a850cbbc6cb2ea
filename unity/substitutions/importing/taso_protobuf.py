"""TASO's rule collections: the protobuf wire format, as far as they use it. What is damaged is named with its byte.

RuleCollection {1: Rule …}   Rule {1: source Operator …, 2: target Operator …, 3: MapOutput …}
Operator {1: type, 2: Tensor …, 3: Parameter …}   Tensor {1: operator, 2: result}   Parameter {1: key, 2: value}
MapOutput {1: source operator, 2: target operator, 3: source result, 4: target result}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unity.base.errors import RuleError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Operator:
    """An operator as released: `inputs` are (operator, result), an operator below 0 being an input variable."""

    kind: int
    inputs: tuple[tuple[int, int], ...]
    parameters: dict[int, int]


@dataclass(frozen=True)
class Released:
    """A rule as released: both graphs, and which results correspond: (source operator, result), (target operator, result)."""

    source: tuple[Operator, ...]
    target: tuple[Operator, ...]
    outputs: tuple[tuple[tuple[int, int], tuple[int, int]], ...]


@dataclass(frozen=True)
class Field:
    """A field of a message: its number, and where its content lies in the file, or its number."""

    number: int
    offset: int
    value: int | bytes


def read_rules(data: bytes) -> tuple[Released, ...]:
    """All rules of a collection. Raises RuleError that names the byte where the file is truncated or malformed."""
    return tuple(_rule(_message(f, "a rule"), f.offset) for f in _fields(data, 0) if _known(f, 1, "a rule collection"))


def _rule(fields: list[Field], offset: int) -> Released:
    operators: dict[int, list[Operator]] = {1: [], 2: []}
    outputs = []
    for f in fields:
        _known(f, 3, "a rule")
        if f.number == 3:
            number = _numbers(f, "an output's map", 4)
            outputs.append(((number[1], number[3]), (number[2], number[4])))
        else:
            operators[f.number].append(_operator(f))
    if not outputs:
        raise RuleError(f"byte {offset}: a rule without outputs")
    return Released(tuple(operators[1]), tuple(operators[2]), tuple(outputs))


def _operator(field: Field) -> Operator:
    kind, inputs, parameters = None, [], {}
    for f in _message(field, "an operator"):
        _known(f, 3, "an operator")
        if f.number == 1:
            kind = _number(f, "an operator's type")
        elif f.number == 2:
            number = _numbers(f, "a tensor", 2)
            inputs.append((number[1], number[2]))
        else:
            number = _numbers(f, "a parameter", 2)
            parameters[number[1]] = number[2]
    if kind is None:
        raise RuleError(f"byte {field.offset}: an operator without a type")
    return Operator(kind, tuple(inputs), parameters)


def _known(field: Field, last: int, what: str) -> bool:
    if not 1 <= field.number <= last:
        raise RuleError(f"byte {field.offset}: {what} has no field {field.number}: is this a TASO rule file?")
    return True


def _message(field: Field, what: str) -> list[Field]:
    if not isinstance(field.value, bytes):
        raise RuleError(f"byte {field.offset}: expected {what}, found a number")
    return list(_fields(field.value, field.offset))


def _number(field: Field, what: str) -> int:
    if not isinstance(field.value, int):
        raise RuleError(f"byte {field.offset}: expected {what}, found bytes")
    return field.value


def _numbers(field: Field, what: str, count: int) -> dict[int, int]:
    """A message of numbers, all of them there."""
    found = {f.number: _number(f, f"field {f.number} of {what}") for f in _message(field, what)}
    for number in range(1, count + 1):
        if number not in found:
            raise RuleError(f"byte {field.offset}: {what} lacks its field {number}")
    return found


def _fields(data: bytes, base: int) -> Iterator[Field]:
    """The fields of a message that begins at byte `base` of the file."""
    at = 0
    while at < len(data):
        start = base + at
        tag, at = _varint(data, at, base)
        kind = tag & 7
        if kind == VARINT:
            value, at = _varint(data, at, base)
            yield Field(tag >> 3, start, value - (1 << 64) if value >> 63 else value)
            continue
        if kind == BYTES:
            length, at = _varint(data, at, base)
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
        else:
            raise RuleError(f"byte {start}: {kind} is no wire type of protobuf: is this a TASO rule file?")
        if at + length > len(data):
            raise RuleError(f"byte {start}: truncated: {length} bytes are announced, and {len(data) - at} are there")
        yield Field(tag >> 3, base + at, data[at : at + length])
        at += length


def _varint(data: bytes, at: int, base: int) -> tuple[int, int]:
    """A number and where it ends."""
    value = 0
    for k in range(10):
        if at + k >= len(data):
            raise RuleError(f"byte {base + at}: truncated in the middle of a number")
        value |= (data[at + k] & 0x7F) << 7 * k
        if data[at + k] < 0x80:
            return value & (1 << 64) - 1, at + k + 1
    raise RuleError(f"byte {base + at}: a number longer than 10 bytes")
