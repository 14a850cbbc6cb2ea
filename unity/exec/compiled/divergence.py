"""Divergence analysis of a compiled program: collectives that some of their devices may not reach, so that others wait for ever.

A collective may be inside of a conditional, or of a loop that devices leave at different steps. It is safe if the devices of each
of its groups provably take the same branch, or the same number of steps. The program is interpreted abstractly. An abstract value
is an equivalence relation on devices, by which provably equal values are equivalent, written as one label for each device.

- A constant is equal on all devices, an argument on those where its sharding says so, and `partition-id` on no two.
- A result is equal on devices where all operands are. Small integers that are computed from `partition-id` and constants alone are
  tracked as numbers (`hlo_integers`), so that two devices of one stage have the same stage number.
- A collective returns equal values to all devices of a group, or to devices at the same position of groups with equal operands.
- The result of a conditional or a loop is equal only on devices where the predicate is, too. A loop's carry is equal on devices
  where it is equal after every step: a fixed point, which is reached after a few steps.

A collective-permute has one group, all devices of the program, whatever its pairs: XLA's runtime for CPUs waits for all of them.

Devices run a computation together while all predicates around it are equal. Nothing is assumed about the values, so a program that
is reported as safe is safe. One that is reported as unsafe may have predicates that happen to agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from unity.exec.compiled.hlo import CALLERS, KINDS
from unity.exec.compiled.hlo_integers import Numbers, computed, constant
from unity.exec.compiled.hlo_text import Computation, Groups, HloInstruction, HloModule, groups, parse, split
from unity.exec.compiled.trip_counts import loop_part

Labels = tuple[int, ...]  # one for each device: equal for devices that surely agree
ABSENT = -1  # the label of a device that provably does not run a computation
_DIFFERENT_ON_EACH_DEVICE = frozenset(
    {"infeed", "recv", "recv-done", "rng", "rng-get-and-update-state", "partition-id", "replica-id"}
)
_FORWARDING = frozenset({"optimization-barrier", "copy-start", "copy-done", "async-done", "async-update"})  # an operand, unchanged


@dataclass(frozen=True)
class Disagreement:
    """A collective that some devices of its groups may not reach.

    Attributes:
        kind: the kind of collective, as in `hlo.CompiledCollective`.
        groups: the groups whose devices may diverge before it.
        source: the plan's operator and the user's line, if the program's names tell.
        op_name: JAX's path of the operation.
        control: the conditional or the loop in which the devices diverge, by its kind and the user's line.
    """

    kind: str
    groups: Groups
    source: str
    op_name: str
    control: str

    def __str__(self) -> str:
        first = ", ".join(map(str, self.groups[0]))
        return f"{self.source or self.op_name or 'the program'}: {self.kind} among devices {first}, which part at {self.control}"


def disagreements(text: str, inputs: Sequence[Labels | None] = ()) -> list[Disagreement]:
    """Return every collective of a compiled program that some devices of its groups may not reach.

    Args:
        text: the compiled HLO, as `hlo.collectives` takes it.
        inputs: for each argument one label for each device, equal for devices with equal values; None if that is unknown.
    """
    module = parse(text)
    interpreter = _Interpreter(module)
    if any(interpreter.communicates(name) for name in interpreter.controlled):
        arguments = [i for i in module.entry.instructions.values() if i.opcode == "parameter"]
        known = inputs if len(inputs) == len(arguments) else [None] * len(arguments)
        values = tuple(_Value(own if own is not None else interpreter.all_different) for own in known)
        interpreter.run(module.entry, values, _Context(interpreter.all_equal, "the program"))
    return list(interpreter.disagreements.values())


def argument_labels(compiled: Any) -> list[Labels | None]:
    """Return labels, for each argument of a `jax.stages.Compiled`, that are equal for devices with equal parts of it."""
    labels: list[Labels | None] = []
    for sharding in jax.tree.leaves(compiled.input_shardings):
        if isinstance(sharding, NamedSharding):
            names = [n for part in sharding.spec if part for n in (part if isinstance(part, tuple) else (part,))]
            shape = tuple(sharding.mesh.shape.values())
            over = [k for k, name in enumerate(sharding.mesh.axis_names) if name in names]
            labels.append(_labels(tuple(at[k] for k in over) for at in np.ndindex(*shape)))
        else:
            labels.append((0,) * sharding.num_devices if sharding.is_fully_replicated else None)
    return labels


def _labels(keys: Iterable[Any]) -> Labels:
    """Return one label for each key, equal for equal keys."""
    numbers: dict[Any, int] = {}
    return tuple(ABSENT if key == ABSENT else numbers.setdefault(key, len(numbers)) for key in keys)


def _refine(a: Labels, b: Labels) -> Labels:
    """Return labels that are equal for devices that agree by both arguments. Devices that are absent in the first stay absent."""
    return a if a == b or not any(b) else _labels(x if x == ABSENT else (x, y) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True, eq=False)
class _Value:
    """An abstract array: the labels of devices, equal where the array is, and its numbers on all devices if they are known."""

    labels: Labels
    numbers: Numbers | None = None

    @cached_property
    def key(self) -> tuple[Any, ...]:
        numbers = self.numbers
        return (self.labels, None if numbers is None else (numbers.shape, str(numbers.dtype), numbers.tobytes()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Value) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


Value = Any  # a `_Value`, or a tuple of values: what an HLO type is


@dataclass(frozen=True)
class _Context:
    """The devices that run a computation together, by equal labels, and the instruction at which they last diverged."""

    labels: Labels
    control: str

    def within(self, labels: Labels, control: str) -> _Context:
        after = _refine(self.labels, labels)
        return self if after == self.labels else _Context(after, control)


def _labels_of(value: Value) -> Labels | None:
    """Return the labels by which all parts of a value are equal; None if it has no parts."""
    if isinstance(value, _Value):
        return value.labels
    parts = [labels for part in value if (labels := _labels_of(part)) is not None]
    return reduce(_refine, parts) if parts else None


def _joined(a: Value, b: Value) -> Value:
    """Join two abstract values, either of which may be the actual one."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(map(_joined, a, b))
    if a == b:
        return a
    labels = [labels for x in (a, b) if (labels := _labels_of(x)) is not None]
    return _Value(reduce(_refine, labels))


def _with_control(value: Value, labels: Labels) -> Value:
    """Return the result of control flow: equal on devices only where its predicate, with these labels, is equal, too."""
    if isinstance(value, tuple):
        return tuple(_with_control(part, labels) for part in value)
    return value if value.numbers is not None else replace(value, labels=_refine(value.labels, labels))


@dataclass
class _Interpreter:
    """An interpreter of computations on abstract values.

    Attributes:
        module: the program.
        disagreements: the collectives that some devices may not reach, by computation and instruction.
        memo: the results of computations, by name, arguments and context.
        effects_memo: the results of `effects`, by name.
    """

    module: HloModule
    disagreements: dict[tuple[str, str], Disagreement] = field(default_factory=dict)
    memo: dict[tuple[Any, ...], Value] = field(default_factory=dict)
    effects_memo: dict[str, tuple[bool, bool]] = field(default_factory=dict)

    @cached_property
    def all_equal(self) -> Labels:
        return (0,) * self.module.devices

    @cached_property
    def all_different(self) -> Labels:
        return tuple(range(self.module.devices))

    @property
    def controlled(self) -> list[str]:
        """The computations that are branches, or parts of loops."""
        every = (i for c in self.module.computations.values() for i in c.instructions.values())
        return [name for i in every if i.opcode in ("conditional", "while") for name in _called(i)]

    def communicates(self, name: str) -> bool:
        """Return whether a computation, or one that it calls, communicates."""
        return self.effects(name)[0]

    def effects(self, name: str) -> tuple[bool, bool]:
        """Return whether a computation or its callees communicate, and whether they have values that differ on each device."""
        if name not in self.effects_memo:
            instructions = self.module.computations[name].instructions.values()
            inner = [self.effects(callee) for i in instructions for callee in _called(i)]
            own = [
                (i.opcode.removesuffix("-start") in KINDS, i.opcode in _DIFFERENT_ON_EACH_DEVICE or _on_host(i))
                for i in instructions
            ]
            self.effects_memo[name] = any(a for a, _ in (*own, *inner)), any(b for _, b in (*own, *inner))
        return self.effects_memo[name]

    def run(self, computation: Computation, arguments: tuple[Value, ...], context: _Context) -> Value:
        """Return the result of a computation."""
        key = (computation.name, arguments, context)
        if key not in self.memo:
            values: dict[str, Value] = {}
            for instruction in computation.instructions.values():
                values[instruction.name] = self.value(computation, instruction, arguments, values, context)
            self.memo[key] = values[computation.root]
        return self.memo[key]

    def value(
        self, computation: Computation, i: HloInstruction, arguments: tuple[Value, ...], values: dict[str, Value], context: _Context
    ) -> Value:
        """Return the result of an instruction."""
        if i.opcode == "parameter":
            return arguments[int(i.operands[0])]
        if i.opcode == "constant":
            return self.shaped(i.type, self.all_equal, constant(i, self.module.devices))
        operands = tuple(values[name] for name in i.operands if name in values)
        kind = i.opcode.removesuffix("-start")
        if kind in KINDS:
            return self.run_collective(computation, i, kind, self.labels(operands), context)
        if i.opcode == "tuple":
            return operands
        if i.opcode == "get-tuple-element":
            (whole,) = operands
            return whole[int(i.attribute(r"index=(\d+)") or 0)] if isinstance(whole, tuple) else whole
        if i.opcode == "while":
            return self.loop(i, operands[0], context)
        if i.opcode == "conditional":
            return self.conditional(i, operands, context)
        if i.opcode in ("call", "async-start") or (i.opcode == "fusion" and self.needs_interpreting(i, operands)):
            return self.run(self.module.computations[_called(i)[0]], operands, context)
        if i.opcode in _FORWARDING or i.opcode.removesuffix("-done") in KINDS:
            return operands[0]
        return self.plain(i, operands, context)

    def needs_interpreting(self, fusion: HloInstruction, operands: tuple[Value, ...]) -> bool:
        """Return whether interpreting a fusion's computation tells more than that its result is equal where all operands are."""
        numbers = any(isinstance(x, _Value) and x.numbers is not None for x in operands)
        return numbers or any(map(any, map(self.effects, _called(fusion))))

    def plain(self, i: HloInstruction, operands: tuple[Value, ...], context: _Context) -> Value:
        """Return the result of an instruction that is neither control flow nor a collective."""
        if i.opcode in ("partition-id", "replica-id") and self.module.replicas == 1:
            devices = self.module.devices
            return self.shaped(i.type, self.all_different, np.arange(devices, dtype=np.uint32) * (i.opcode == "partition-id"))
        if i.opcode in _DIFFERENT_ON_EACH_DEVICE or _on_host(i):
            return self.shaped(i.type, self.all_different)
        for name in filter(self.communicates, _called(i)):
            self.run(self.module.computations[name], operands, context)
        numbers = [x.numbers for x in operands if isinstance(x, _Value) and x.numbers is not None]
        known = computed(i, numbers, self.module.devices) if len(numbers) == len(operands) else None
        return self.shaped(i.type, self.labels(operands), known)

    def labels(self, operands: tuple[Value, ...]) -> Labels:
        """Return the labels by which all operands are equal."""
        labels = _labels_of(operands)
        return self.all_equal if labels is None else labels

    def shaped(self, type_: str, labels: Labels, numbers: Numbers | None = None) -> Value:
        """Return a value of an HLO type whose parts are all equal by these labels, or by their numbers, if these are known."""
        if type_.startswith("("):
            return tuple(self.shaped(part, labels) for part in split(type_.strip()[1:-1]))
        if numbers is None:
            return _Value(labels)
        return _Value(_labels(row.tobytes() for row in np.ascontiguousarray(numbers)), numbers)

    def loop(self, i: HloInstruction, start: Value, context: _Context) -> Value:
        """Interpret a loop to its fixed point, and return its result."""
        test, body = (self.module.computations[loop_part(i, part)] for part in ("condition", "body"))
        now = start
        while True:
            steps = self.labels((self.run(test, (now,), context),))
            inner = context.within(steps, self.name(i))
            self.run(test, (now,), inner)
            after = _joined(now, self.run(body, (now,), inner))
            if after == now:
                return _with_control(now, steps)
            now = after

    def conditional(self, i: HloInstruction, operands: tuple[Value, ...], context: _Context) -> Value:
        """Interpret every branch of a conditional, and return the joined result."""
        predicate, names = operands[0], _called(i)
        chosen = None if predicate.numbers is None else self.taken_branches(predicate.numbers, len(names))
        results = []
        for k, name in enumerate(names):
            inner = context.within(predicate.labels, self.name(i))
            if chosen is not None:
                inner = _Context(tuple(a if b == k else ABSENT for a, b in zip(inner.labels, chosen, strict=True)), inner.control)
            results.append(self.run(self.module.computations[name], (operands[1 + k],), inner))
        return _with_control(reduce(_joined, results), predicate.labels)

    def taken_branches(self, predicate: Numbers, branches: int) -> list[int]:
        """Return the branch of each device: the first of two if a predicate is true, the last if an index is out of range."""
        if predicate.dtype == bool:
            return [0 if yes else 1 for yes in predicate]
        return [int(k) if 0 <= k < branches else branches - 1 for k in predicate]

    def run_collective(self, computation: Computation, i: HloInstruction, kind: str, labels: Labels, context: _Context) -> Value:
        """Return the result of a collective, and record a disagreement if its devices may have diverged."""
        every = groups(i, self.module.devices)
        waiting = (tuple(range(self.module.devices)),) if kind == "collective-permute" else every
        if parted := tuple(group for group in waiting if len({context.labels[d] for d in group}) > 1):
            self.disagreements[computation.name, i.name] = Disagreement(kind, parted, self.source(i), i.op_name, context.control)
        keys: list[Any] = [("nothing", label) for label in labels]
        if kind == "collective-permute":
            keys = ["nothing"] * len(labels)
            for source, target in every:
                keys[target] = labels[source]
        else:
            for group in every:
                for place, device in enumerate(group):
                    own = place if kind not in ("all-reduce", "all-gather") else 0
                    keys[device] = (tuple(labels[d] for d in group), own)
        return self.shaped(i.type, _labels(keys)) if not i.opcode.endswith("-start") else _Value(_labels(keys))

    def name(self, i: HloInstruction) -> str:
        """Return the name of a conditional or a loop for messages."""
        source = self.source(i)
        return f"the {i.opcode}{f' of {source}' if source else ''}"

    def source(self, i: HloInstruction) -> str:
        """Return the plan's operator and the user's line of an instruction; else the line alone."""
        plans = re.findall(r"[\w.-]+ at [^/()]+:\d+", i.op_name)
        return plans[-1] if plans else self.module.source(i)


def _called(i: HloInstruction) -> list[str]:
    """Return the computations that run as part of an instruction; a reduction's scalar function does not count."""
    if i.opcode == "while":
        return [loop_part(i, part) for part in ("condition", "body")]
    return i.callees() if i.opcode in CALLERS else []


def _on_host(i: HloInstruction) -> bool:
    """Return whether the host computes an instruction's result, which may differ from device to device."""
    return i.opcode == "custom-call" and "callback" in (i.attribute(r'custom_call_target="([^"]*)"') or "")
