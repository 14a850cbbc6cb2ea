"""How long a compiled program takes in the order that XLA schedules it in, and how much of its communication is hidden.

Nothing is run. A kernel takes as long as a roofline says: the larger of its arithmetic and of what it reads and writes, and a
launch. A collective takes what the machine's formulas say. Kernels run one after the other, in the order of the text, and so do
collectives: one begins at its start, or when the one before it has ended, and runs beside the kernels until its done, which waits
for it. A collective that is not such a pair keeps the device waiting. Asynchronous copies take no time. A loop takes its trip count
times one step, and nothing overlaps between its steps; one whose trip count is unknown takes one step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from unity.exec.compiled.hlo import CALLERS, KINDS
from unity.exec.compiled.hlo_text import Computation, HloInstruction, HloModule, arrays, groups, nbytes, parse
from unity.exec.compiled.trip_counts import loop_part, trip_count
from unity.machine.collectives import collective_seconds
from unity.machine.machine import Machine

# Instructions that launch no kernel.
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "opt-barrier")
PARTLY_READ = ("dynamic-slice", "slice", "gather")  # of their first operand, as much as they return
DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@dataclass
class ScheduledTime:
    """Seconds of a part of a compiled program, from its start.

    Attributes:
        now: When the last of its kernels ends.
        free: When the last of its collectives ends.
        computing: The seconds of all kernels.
        communicating: The seconds of all collectives.
        ends: When collectives that were started end, by the name of the start.
    """

    now: float = 0.0
    free: float = 0.0
    computing: float = 0.0
    communicating: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)

    @property
    def hidden(self) -> float:
        """The part of the communication during which kernels run; 1 without communication."""
        return 1 - (self.now - self.computing) / self.communicating if self.communicating else 1.0

    def compute(self, seconds: float) -> None:
        """Run a kernel."""
        self.now += seconds
        self.computing += seconds

    def start(self, name: str, seconds: float) -> None:
        """Start a collective."""
        self.free = self.ends[name] = max(self.now, self.free) + seconds
        self.communicating += seconds

    def wait(self, name: str) -> None:
        """Wait for a collective."""
        self.now = max(self.now, self.ends.get(name, self.now))

    def repeat(self, part: ScheduledTime, count: int) -> None:
        """Run a part, such as the step of a loop, a number of times."""
        self.now = max(self.now, self.free) if part.communicating else self.now
        self.now += count * part.now
        self.computing += count * part.computing
        self.communicating += count * part.communicating


@dataclass(frozen=True)
class Schedule:
    """The scheduled HLO of a program for a machine."""

    module: HloModule
    machine: Machine

    def timed(self, computation: Computation) -> ScheduledTime:
        """Return the times of one run of a computation."""
        time = ScheduledTime()
        for instruction in computation.instructions.values():
            self.run(computation, instruction, time)
        time.now = max(time.now, time.free)
        return time

    def run(self, computation: Computation, instruction: HloInstruction, time: ScheduledTime) -> None:
        """Add the times of an instruction."""
        opcode, name = instruction.opcode, instruction.name
        if opcode.endswith("-done"):
            time.wait(instruction.operands[0])
        elif (kind := self.kind(instruction)) is not None:
            time.start(name, self.collective_seconds(computation, instruction, kind))
            if not opcode.endswith("-start"):
                time.wait(name)
        elif opcode.endswith("-start"):  # a copy
            time.ends[name] = time.now
        elif opcode == "while":
            step = self.module.computations[loop_part(instruction, "body")]
            time.repeat(self.timed(step), trip_count(self.module, computation, instruction) or 1)
        elif opcode in ("call", "conditional"):
            parts = (self.timed(self.module.computations[callee]) for callee in instruction.callees())
            time.repeat(max(parts, key=lambda part: part.now), 1)
        elif opcode not in FREE:
            time.compute(self.kernel_seconds(computation, instruction))

    def kind(self, instruction: HloInstruction) -> str | None:
        """Return the kind of a collective, or of one in an asynchronous call; None for other instructions."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode == "async":
            inner = (self.module.computations[callee].instructions.values() for callee in instruction.callees())
            return next((i.opcode for body in inner for i in body if i.opcode in KINDS), None)
        return opcode if opcode in KINDS else None

    def collective_seconds(self, computation: Computation, instruction: HloInstruction, kind: str) -> float:
        """Return the seconds of a collective, priced by its side that has all of the data."""
        sides = [sum(nbytes(*array) for array in arrays(computation.instructions[o].type)) for o in instruction.operands]
        members = groups(instruction, self.module.devices)
        size = len(members[0])
        full = sum(sides) * (size if kind == "all-gather" else 1)
        axes, mesh = self.machine.axes, tuple(axis.size for axis in self.machine.axes)
        places = np.array(np.unravel_index(np.array(members[0]), mesh))
        spanned = [axis for axis, along in zip(axes, places, strict=True) if len(set(along.tolist())) > 1]
        return collective_seconds(self.machine, kind, spanned, full) if spanned else 0.0

    def kernel_seconds(self, computation: Computation, instruction: HloInstruction) -> float:
        """Return the seconds of a kernel by the roofline."""
        device = self.machine.device
        flops, dtype = self.arithmetic(computation, instruction)
        arithmetic = flops / (device.flops_of(DTYPES.get(dtype, "float32")) * device.efficiency)
        return max(arithmetic, self.traffic(computation, instruction) / device.bandwidth) + device.launch

    def arithmetic(self, computation: Computation, instruction: HloInstruction) -> tuple[float, str]:
        """Return the FLOPs of products and convolutions in a kernel, and the type of their operands."""
        if instruction.opcode in ("dot", "convolution"):
            return self.product_flops(computation, instruction)
        if (target := instruction.attribute(r'custom_call_target="__cudnn\$conv([^"]*)"')) is not None:
            return self.convolution_flops(computation, instruction, target)
        if (instruction.attribute(r'custom_call_target="(__cublas)') or "") == "__cublas":
            return self.library_product_flops(computation, instruction)
        inside = [self.module.computations[callee] for callee in instruction.callees()] if instruction.opcode in CALLERS else []
        found = [self.arithmetic(body, i) for body in inside for i in body.instructions.values()]
        flops, dtype = max(found, default=(0.0, "f32"))
        return sum(f for f, _ in found) if flops else 0.0, dtype

    def product_flops(self, computation: Computation, dot: HloInstruction) -> tuple[float, str]:
        """Return the FLOPs of a product, and the type of its operands."""
        dtype, sizes = _shape(computation.instructions[dot.operands[0]].type)
        contracted = dot.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        return 2.0 * _elements(dot.type) * prod(sizes[int(d)] for d in contracted.split(",") if d), dtype

    def library_product_flops(self, computation: Computation, call: HloInstruction) -> tuple[float, str]:
        """Return the FLOPs of a product that a library computes, and the type of its operands."""
        dtype, sizes = _shape(computation.instructions[call.operands[0]].type)
        contracted = re.findall(r"\d+", call.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]') or "")
        return 2.0 * _elements(call.type) * prod(sizes[int(d)] for d in contracted), dtype

    def convolution_flops(self, computation: Computation, call: HloInstruction, target: str) -> tuple[float, str]:
        """Return the FLOPs of a convolution that a library computes, and the type of its operands."""
        types = [computation.instructions[o].type for o in call.operands[:2]]
        results = call.type
        if target == "BackwardFilter":
            kernel, output = results, types[1]
        else:
            kernel, output = types[1], types[0] if target == "BackwardInput" else results
        labels = call.attribute(r"dim_labels=\w+_(\w+)->") or ""
        dtype, sizes = _shape(kernel)
        return 2.0 * _elements(output) * prod(sizes) / sizes[labels.index("o")], dtype

    def traffic(self, computation: Computation, instruction: HloInstruction) -> float:
        """Return the bytes that a kernel reads and writes."""
        operands = [_nbytes(computation.instructions[o].type) for o in instruction.operands]
        if instruction.opcode in PARTLY_READ:
            return sum(operands[1:]) + 2 * _nbytes(instruction.type)
        if instruction.opcode == "dynamic-update-slice":
            return sum(operands[1:]) + operands[1]
        if instruction.opcode != "fusion":
            return sum(operands) + _nbytes(instruction.type)
        body = self.module.computations[instruction.callees()[0]]
        parameters = {int(i.operands[0]): i.name for i in body.instructions.values() if i.opcode == "parameter"}
        return sum(_read(body, parameters[k], whole) for k, whole in enumerate(operands)) + _written(body)


def scheduled(text: str, machine: Machine) -> ScheduledTime:
    """Return the times of a compiled program, given its text."""
    module = parse(text)
    return Schedule(module, machine).timed(module.entry)


def _read(body: Computation, parameter: str, whole: int) -> int:
    """Return the bytes that a fusion reads of an operand of so many bytes: a slice, or all of it."""
    part = 0
    for user in body.instructions.values():
        if user.opcode == "parameter" or parameter not in user.operands:
            continue
        if user.opcode == "bitcast":
            part += _read(body, user.name, whole)
        elif user.opcode in PARTLY_READ and user.operands[0] == parameter:
            part += _nbytes(user.type)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != parameter:
            return whole
    return min(part, whole)


def _written(body: Computation) -> int:
    """Return the bytes that a fusion writes: of a value that is updated in place, the part."""
    root = body.instructions[body.root]
    written = 0
    for result in root.operands if root.opcode == "tuple" else (root.name,):
        value = body.instructions[result]
        while value.opcode == "bitcast":
            value = body.instructions[value.operands[0]]
        updated = value.opcode == "dynamic-update-slice"
        written += _nbytes(body.instructions[value.operands[1]].type if updated else value.type)
    return written


def _nbytes(hlo_type: str) -> int:
    return sum(nbytes(*array) for array in arrays(hlo_type))


def _elements(hlo_type: str) -> int:
    """Return the number of elements of a type, or of the first one of a tuple."""
    return arrays(hlo_type)[0][1]


def _shape(hlo_type: str) -> tuple[str, Sequence[int]]:
    """Return the element type and the sizes of a type, or of the first one of a tuple."""
    match = re.search(r"([a-z]\w*)\[([\d,]*)\]", hlo_type)
    assert match is not None, hlo_type
    return match[1], [int(size) for size in match[2].split(",") if size]
