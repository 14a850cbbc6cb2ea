"""A parser of compiled HLO text: computations, instructions, shapes, device groups, source lines.

The text is the result of `jax.jit(f).lower(...).compile().as_text()`. Only the parts that `unity.exec.compiled` needs are parsed,
and each only on demand: the text of a large model has hundreds of thousands of lines, of which few are about communication. The
grammar is XLA's (`xla/hlo/parser`, `xla/hlo/ir/replica_group.cc` and `xla/hlo/ir/mesh_and_axis.cc`), as printed by jaxlib 0.10.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

import numpy as np

_NAME = r"[\w.\-~$@<>]+"
_INSTRUCTION = re.compile(rf"(ROOT )?%?({_NAME}) = (.*)")
# The opcode is the first word in lower case between a blank and a parenthesis: layouts have `:T(8,128)`.
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_HEADER = re.compile(rf"(ENTRY )?%?({_NAME})[ (].*{{$")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_TUPLE_INDEX = re.compile(r"/\*index=\d+\*/")
_CALLEE = re.compile(rf"(?:to_apply|calls|true_computation|false_computation)=%?({_NAME})")
_CALLEES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_QUOTED = re.compile(r'(\d+) "(.*)"$')
_LINE_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
# Replica groups print in three forms, the last with or without the order of its devices.
_GROUPS = re.compile(
    r"replica_groups=(?P<groups>\{\}|\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\((?:\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))? \{[^}]*\})"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_IOTA = re.compile(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^}]*)\}$")
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_AXIS_REFERENCE = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class HloInstruction:
    """One line: `name = type opcode(operands), attributes`. `rest` is the line from the operands on."""

    name: str
    type: str
    opcode: str
    rest: str

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands (of a parameter or a constant: its number or value)."""
        parts = split(self.rest[: _closing(self.rest)])
        return tuple(part.split()[-1].removeprefix("%") for part in parts)

    @cached_property
    def attributes(self) -> str:
        """The text behind the operands, `metadata` and `backend_config` included."""
        return self.rest[_closing(self.rest) + 1 :]

    def attribute(self, pattern: str) -> str | None:
        """Return the first group of `pattern` in the attributes, or None if it does not occur."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    @property
    def op_name(self) -> str:
        """JAX's path of the operation, or "" if the text does not tell."""
        return self.attribute(r'op_name="((?:[^"\\]|\\.)*)"') or ""

    def callees(self) -> list[str]:
        """Names of the computations that the instruction calls, other than a loop's."""
        several = ",".join(_CALLEES.findall(self.attributes))
        return [*_CALLEE.findall(self.attributes), *(name.removeprefix("%") for name in split(several))]


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text (in compiled HLO: of execution); `root` names the result."""

    name: str
    instructions: dict[str, HloInstruction]
    root: str


@dataclass(frozen=True)
class HloModule:
    """A compiled program.

    Attributes:
        entry: the computation that runs first.
        computations: all computations by name.
        devices: the number of devices that run the program, all replicas of all partitions.
        frames: "file.py:42" for the number of each stack frame.
        replicas: the number of replicas of the partitions.
    """

    entry: Computation
    computations: dict[str, Computation]
    devices: int
    frames: dict[int, str]
    replicas: int = 1

    def source(self, instruction: HloInstruction) -> str:
        """Return the instruction's "file.py:42", from the innermost of the user's frames, or "" if the text does not tell."""
        file = instruction.attribute(r'source_file="([^"]*)"')
        if file is not None:
            line = instruction.attribute(r"source_line=(\d+)") or 0
            return f"{PurePath(file).name}:{line}"
        frame = instruction.attribute(r"stack_frame_id=(\d+)")
        return "" if frame is None else self.frames.get(int(frame), "")


def parse(text: str) -> HloModule:
    """Parse the text of one compiled module.

    Raises:
        ValueError: the text has no ENTRY computation. It is not HLO then, but for instance StableHLO.
    """
    header, entry, computations = "", None, {}
    tables: dict[str, list[str]] = {}
    table: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        stripped = line.strip()
        if stripped.startswith("HloModule"):
            header = stripped
        elif stripped in _LINE_TABLES:
            table = tables.setdefault(stripped, [])
        elif start := _HEADER.match(stripped):
            computation = _computation(start[2], lines)
            computations[computation.name] = computation
            entry = computation if start[1] else entry
        elif stripped:
            table.append(stripped)
    if entry is None:
        raise ValueError(
            "this text has no ENTRY computation, so it is not compiled HLO: "
            "pass jax.jit(f).lower(...).compile().as_text(), not the StableHLO of lower(...).as_text()"
        )
    sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    replicas = math.prod(map(int, re.findall(r"replica_count=(\d+)", header)))
    return HloModule(entry, computations, math.prod(map(int, sizes)), _frames(tables), replicas)


def arrays(type_: str) -> list[tuple[str, int]]:
    """Return (dtype, number of elements) of every array in a type, tuples flattened; tokens and opaque values left out.

    A dynamic dimension (`f32[<=8]`) counts with its bound.
    """
    parsed = ((dtype, re.findall(r"\d+", dimensions)) for dtype, dimensions in _ARRAY.findall(type_))
    return [(dtype, math.prod(map(int, sizes))) for dtype, sizes in parsed if dtype not in ("token", "opaque")]


def nbytes(dtype: str, elements: int) -> int:
    """Return the bytes of `elements` elements: `pred` takes one byte each, types of less than 8 bits are packed."""
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return elements if bits is None else -(-elements * int(bits[1]) // 8)


def split(text: str) -> list[str]:
    """Split a text at the commas outside of all brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def groups(instruction: HloInstruction, devices: int) -> Groups:
    """Return the groups of devices that exchange data, from `replica_groups` or, as pairs, `source_target_pairs`.

    Devices are numbered by their position in the program's mesh, as XLA does, not by `Device.id`.
    """
    pairs = _PAIRS.search(instruction.attributes)
    if pairs:
        return _listed(pairs[1])
    match = _GROUPS.search(instruction.attributes)
    text = match["groups"] if match else "{}"
    if text == "{}":
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return _listed(text[1:-1])
    return _mesh_groups(text) if text.startswith("mesh") else _rows(_iota(text))


def _computation(name: str, lines: Iterator[str]) -> Computation:
    """Read a computation's lines up to the closing brace."""
    instructions, root = {}, ""
    for line in lines:
        stripped = _TUPLE_INDEX.sub("", line.strip()) if "/*" in line else line.strip()
        if stripped.startswith("}"):
            break
        match = _INSTRUCTION.match(stripped)
        opcode = _OPCODE.search(stripped, match.start(3)) if match else None
        if not match or not opcode:
            continue
        instructions[match[2]] = HloInstruction(
            match[2], stripped[match.start(3) : opcode.start()], opcode[1], stripped[opcode.end() :]
        )
        root = match[2] if match[1] else root
    # in the text's short form no root is marked: it is the last instruction
    return Computation(name, instructions, root or next(reversed(instructions), ""))


def _closing(text: str) -> int:
    """Return the position of the parenthesis that closes the one just before `text`."""
    depth = 0
    for bracket in re.finditer(r"[()]", text):
        depth += 1 if bracket[0] == "(" else -1
        if depth < 0:
            return bracket.start()
    return len(text)


def _frames(tables: dict[str, list[str]]) -> dict[int, str]:
    """Return "file.py:42" by the number of a stack frame, from the tables at the top of the module (empty in older texts)."""
    quoted = (_QUOTED.match(line) for line in tables.get("FileNames", []))
    files = {int(entry[1]): PurePath(entry[2]).name for entry in quoted if entry}
    locations = {}
    for line in tables.get("FileLocations", []):
        number, fields = _fields(line)
        locations[number] = f"{files.get(fields['file_name_id'], '?')}:{fields['line']}"
    frames = (_fields(line) for line in tables.get("StackFrames", []))
    return {number: locations[fields["file_location_id"]] for number, fields in frames}


def _fields(line: str) -> tuple[int, dict[str, int]]:
    """Parse a row of a line table: `3 {file_name_id=1 line=42}` -> (3, {"file_name_id": 1, "line": 42})."""
    number, _, fields = line.partition(" ")
    return int(number), {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", fields)}


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _listed(text: str) -> Groups:
    return tuple(_integers(group) for group in re.findall(r"\{([\d,]+)\}", text))


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.tolist())


def _iota(text: str) -> np.ndarray:
    """Parse an array of devices. `[4,2]<=[2,4]T(1,0)` is 0..7 in shape [2,4], transposed by (1,0), and reshaped to [4,2]."""
    match = _IOTA.match(text)
    if not match:
        raise ValueError(f"unknown form of an array of devices in HLO: {text!r} (expected like [4,2]<=[2,4]T(1,0))")
    shape = _integers(match[2])
    order = _integers(match[3]) if match[3] else tuple(range(len(shape)))
    array = np.arange(math.prod(shape)).reshape(shape).transpose(order)
    return array.reshape(_integers(match[1])) if match[1] else array


def _mesh_groups(text: str) -> Groups:
    """Parse replica groups along axes of a mesh, or along parts of them: `mesh['a'=4,'b'=2], device_ids=(...) {'a':(2)2}`.

    Part `(p)s` of an axis is its middle dimension if the axis is reshaped to [p, s, rest].
    """
    match = _MESH.match(text)
    if not match:
        raise ValueError(f"unknown form of replica groups in HLO: {text!r} (expected like mesh['a'=2,'b'=4] {{'b'}})")
    axes = {name: int(size) for name, size in _MESH_AXIS.findall(match[1])}
    ids = match[2] or f"[{math.prod(axes.values())}]"
    devices = _iota(ids) if ids.startswith("[") else np.array(_integers(ids))
    shape: list[int] = []
    grouped: list[int] = []
    references = _AXIS_REFERENCE.findall(match[3])
    for name, size in axes.items():
        whole = any(axis == name and not part for axis, part, _ in references)
        parts = [(1, size)] if whole else sorted((int(p), int(s)) for axis, p, s in references if axis == name)
        done = 1
        for before, part in parts:
            shape += [before // done, part]
            grouped.append(len(shape) - 1)
            done = before * part
        shape.append(size // done)
    others = [i for i in range(len(shape)) if i not in grouped]
    members = math.prod(shape[i] for i in grouped)
    return _rows(devices.reshape(shape).transpose(others + grouped).reshape(-1, members))
