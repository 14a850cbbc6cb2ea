"""The file format of TASO's rules: the protobuf wire format, as far as they use it. Errors name the byte of the damage.

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
class TasoOperator:
    """A released operator. `inputs` are (operator, result); a negative operator is an input variable."""

    kind: int
    inputs: tuple[tuple[int, int], ...]
    parameters: dict[int, int]


@dataclass(frozen=True)
class TasoRule:
    """A released rule: two graphs, and the corresponding outputs as ((source operator, result), (target operator, result))."""

    source: tuple[TasoOperator, ...]
    target: tuple[TasoOperator, ...]
    outputs: tuple[tuple[tuple[int, int], tuple[int, int]], ...]


@dataclass(frozen=True)
class Field:
    """A field of a message: its number, the byte where it begins, and its content, a number or bytes."""

    number: int
    offset: int
    value: int | bytes


def read_rules(data: bytes) -> tuple[TasoRule, ...]:
    """Read all rules of a file. Raises RuleError, naming the byte where it is truncated or malformed."""
    fields = (_check_number(f, 1, "a rule collection") for f in _fields(data, 0))
    return tuple(_rule(_message(f, "a rule"), f.offset) for f in fields)


def _rule(fields: list[Field], offset: int) -> TasoRule:
    operators: dict[int, list[TasoOperator]] = {1: [], 2: []}
    outputs = []
    for f in fields:
        _check_number(f, 3, "a rule")
        if f.number == 3:
            number = _numbers(f, "an output's map", 4)
            outputs.append(((number[1], number[3]), (number[2], number[4])))
        else:
            operators[f.number].append(_operator(f))
    if not outputs:
        raise RuleError(f"byte {offset}: a rule without outputs")
    return TasoRule(tuple(operators[1]), tuple(operators[2]), tuple(outputs))


def _operator(field: Field) -> TasoOperator:
    kind, inputs, parameters = None, [], {}
    for f in _message(field, "an operator"):
        _check_number(f, 3, "an operator")
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
    return TasoOperator(kind, tuple(inputs), parameters)


def _check_number(field: Field, last: int, what: str) -> Field:
    """Return a field of a message that has fields from 1 to `last`."""
    if not 1 <= field.number <= last:
        raise RuleError(f"byte {field.offset}: {what} has no field {field.number}: is this a TASO rule file?")
    return field


def _message(field: Field, what: str) -> list[Field]:
    """Return the fields of a field that is a message."""
    if not isinstance(field.value, bytes):
        raise RuleError(f"byte {field.offset}: expected {what}, found a number")
    return list(_fields(field.value, field.offset))


def _number(field: Field, what: str) -> int:
    """Return the content of a field that is a number."""
    if not isinstance(field.value, int):
        raise RuleError(f"byte {field.offset}: expected {what}, found bytes")
    return field.value


def _numbers(field: Field, what: str, count: int) -> dict[int, int]:
    """Return a message of numbers, by the numbers of its fields. All must be present."""
    numbers = {f.number: _number(f, f"field {f.number} of {what}") for f in _message(field, what)}
    for number in range(1, count + 1):
        if number not in numbers:
            raise RuleError(f"byte {field.offset}: {what} lacks its field {number}")
    return numbers


def _fields(data: bytes, base: int) -> Iterator[Field]:
    """Yield the fields of a message that begins at byte `base` of the file."""
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
            raise RuleError(f"byte {start}: {kind} is not a wire type of protobuf: is this a TASO rule file?")
        if at + length > len(data):
            raise RuleError(f"byte {start}: truncated: {length} bytes are announced, and {len(data) - at} are there")
        yield Field(tag >> 3, base + at, data[at : at + length])
        at += length


def _varint(data: bytes, at: int, base: int) -> tuple[int, int]:
    """Decode a number, and return it with the position after it."""
    value = 0
    for k in range(10):
        if at + k >= len(data):
            raise RuleError(f"byte {base + at}: truncated in the middle of a number")
        value |= (data[at + k] & 0x7F) << 7 * k
        if data[at + k] < 0x80:
            return value & (1 << 64) - 1, at + k + 1
    raise RuleError(f"byte {base + at}: a number longer than 10 bytes")
