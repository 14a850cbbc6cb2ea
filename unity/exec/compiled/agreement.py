"""Collectives of a compiled program that not all of their devices reach: a device that comes waits for the others for ever.

A collective may lie inside of a conditional, or of a loop that devices leave at different steps. It is safe if the devices of each
of its groups surely take the same branch, or as many steps. So the program is interpreted once, not on numbers but on this: which
devices surely hold the same value. That is an equivalence of devices for each value, written as a label for each device.

- Constants are the same on all devices, arguments where their shardings say so, `partition-id` on none.
- What is computed is the same where all operands are. Small integers that are computed from `partition-id` and constants alone are
  followed as numbers (`hlo_numbers`), so two devices of one stage hold the same number of it.
- A collective gives the same to all devices of a group, or the same to devices at the same place of groups that put in the same.
- What comes out of a conditional, or of a loop, is the same where the predicate is, too. What goes round in a loop is the same if
  it is in every step: the finest equivalence of all steps, which is reached after a few.

A collective-permute has one group, all devices of the program, whoever sends to whom: XLA's runtime for CPUs waits for all of them.

Devices run together as long as all predicates around them are the same. Nothing is assumed of the values themselves, so what is
called safe is; a program that is called unsafe may still be one whose predicates happen to agree.
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

from unity.exec.compiled.hlo import KINDS
from unity.exec.compiled.hlo_integers import Numbers, computed, constant
from unity.exec.compiled.hlo_text import Computation, Groups, Instruction, Module, groups, parse, split
from unity.exec.compiled.trip_counts import loop_part

Labels = tuple[int, ...]  # one for each device: equal for devices that surely agree
ABSENT = -1  # the label of a device that surely does not run a computation
_EVERY_DEVICE_ITS_OWN = frozenset({"infeed", "recv", "recv-done", "rng", "rng-get-and-update-state", "partition-id", "replica-id"})
_SAME = frozenset({"optimization-barrier", "copy-start", "copy-done", "async-done", "async-update"})  # an operand, unchanged


@dataclass(frozen=True)
class Disagreement:
    """A collective that not all devices of its groups surely reach.

    kind, source, op_name: of the collective, as `hlo.Collective` has them.
    groups: those of its groups whose devices may part before it.
    control: the conditional or the loop in which they part, by its kind and the user's line.
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
    """Every collective of a compiled program that not all devices of its groups surely reach.

    Args:
        text: the compiled HLO, as `hlo.collectives` takes it.
        inputs: for each argument a label for each device, equal where devices hold the same; None, or none at all: unknown.
    """
    module = parse(text)
    interpreter = _Interpreter(module)
    if any(interpreter.collective(name) for name in interpreter.controlled):
        arguments = [i for i in module.entry.instructions.values() if i.opcode == "parameter"]
        known = inputs if len(inputs) == len(arguments) else [None] * len(arguments)
        values = tuple(_Value(own if own is not None else interpreter.apart) for own in known)
        interpreter.run(module.entry, values, _Context(interpreter.together, "the program"))
    return list(interpreter.found.values())


def argument_labels(compiled: Any) -> list[Labels | None]:
    """Labels the devices that hold equal parts of each argument of a compiled program (`jax.stages.Compiled`)."""
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
    """Labels that are equal where keys are."""
    seen: dict[Any, int] = {}
    return tuple(ABSENT if key == ABSENT else seen.setdefault(key, len(seen)) for key in keys)


def _both(a: Labels, b: Labels) -> Labels:
    """Devices that agree in both ways. Who is absent in the first stays so."""
    return a if a == b or not any(b) else _labels(x if x == ABSENT else (x, y) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True, eq=False)
class _Value:
    """An array of the program: on which devices it is the same, and its numbers, where these are known."""

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
    """The devices that run a computation together, and the instruction at which they last parted."""

    labels: Labels
    control: str

    def within(self, labels: Labels, control: str) -> _Context:
        after = _both(self.labels, labels)
        return self if after == self.labels else _Context(after, control)


def _of(value: Value) -> Labels | None:
    """On which devices all parts of a value are the same; None if it has no parts."""
    if isinstance(value, _Value):
        return value.labels
    parts = [labels for part in value if (labels := _of(part)) is not None]
    return reduce(_both, parts) if parts else None


def _joined(a: Value, b: Value) -> Value:
    """Joins what is known of two values, either of which may be taken."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(map(_joined, a, b))
    if a == b:
        return a
    labels = [labels for x in (a, b) if (labels := _of(x)) is not None]
    return _Value(reduce(_both, labels))


def _refined(value: Value, labels: Labels) -> Value:
    """A value that devices have which came by different ways."""
    if isinstance(value, tuple):
        return tuple(_refined(part, labels) for part in value)
    return value if value.numbers is not None else replace(value, labels=_both(value.labels, labels))


@dataclass
class _Interpreter:
    """Interprets computations on values that are equivalences of devices."""

    module: Module
    found: dict[tuple[str, str], Disagreement] = field(default_factory=dict)
    memory: dict[tuple[Any, ...], Value] = field(default_factory=dict)
    holding: dict[str, tuple[bool, bool]] = field(default_factory=dict)

    @cached_property
    def together(self) -> Labels:
        return (0,) * self.module.devices

    @cached_property
    def apart(self) -> Labels:
        return tuple(range(self.module.devices))

    @property
    def controlled(self) -> list[str]:
        """The computations that are branches, or parts of loops."""
        every = (i for c in self.module.computations.values() for i in c.instructions.values())
        return [name for i in every if i.opcode in ("conditional", "while") for name in _called(i)]

    def collective(self, name: str) -> bool:
        """Whether a computation, or one that it calls, communicates."""
        return self.holds(name)[0]

    def holds(self, name: str) -> tuple[bool, bool]:
        """Whether a computation, or one that it calls, communicates; and whether it asks which device runs it, or draws numbers."""
        if name not in self.holding:
            instructions = self.module.computations[name].instructions.values()
            inner = [self.holds(callee) for i in instructions for callee in _called(i)]
            own = [
                (i.opcode.removesuffix("-start") in KINDS, i.opcode in _EVERY_DEVICE_ITS_OWN or _on_host(i)) for i in instructions
            ]
            self.holding[name] = any(a for a, _ in (*own, *inner)), any(b for _, b in (*own, *inner))
        return self.holding[name]

    def run(self, computation: Computation, arguments: tuple[Value, ...], context: _Context) -> Value:
        """The result of a computation."""
        key = (computation.name, arguments, context)
        if key not in self.memory:
            values: dict[str, Value] = {}
            for instruction in computation.instructions.values():
                values[instruction.name] = self.value(computation, instruction, arguments, values, context)
            self.memory[key] = values[computation.root]
        return self.memory[key]

    def value(
        self, computation: Computation, i: Instruction, arguments: tuple[Value, ...], values: dict[str, Value], context: _Context
    ) -> Value:
        """The result of an instruction."""
        if i.opcode == "parameter":
            return arguments[int(i.operands[0])]
        if i.opcode == "constant":
            return self.shaped(i.type, self.together, constant(i, self.module.devices))
        operands = tuple(values[name] for name in i.operands if name in values)
        kind = i.opcode.removesuffix("-start")
        if kind in KINDS:
            return self.communicated(computation, i, kind, self.labels(operands), context)
        if i.opcode == "tuple":
            return operands
        if i.opcode == "get-tuple-element":
            (whole,) = operands
            return whole[int(i.attribute(r"index=(\d+)") or 0)] if isinstance(whole, tuple) else whole
        if i.opcode == "while":
            return self.loop(i, operands[0], context)
        if i.opcode == "conditional":
            return self.conditional(i, operands, context)
        if i.opcode in ("call", "async-start") or (i.opcode == "fusion" and self.matters(i, operands)):
            return self.run(self.module.computations[_called(i)[0]], operands, context)
        if i.opcode in _SAME or i.opcode.removesuffix("-done") in KINDS:
            return operands[0]
        return self.plain(i, operands, context)

    def matters(self, fusion: Instruction, operands: tuple[Value, ...]) -> bool:
        """Whether more is known of a fusion's result than that it is the same where all operands are."""
        numbers = any(isinstance(x, _Value) and x.numbers is not None for x in operands)
        return numbers or any(map(any, map(self.holds, _called(fusion))))

    def plain(self, i: Instruction, operands: tuple[Value, ...], context: _Context) -> Value:
        """The result of an instruction that does not communicate, and calls nothing that does."""
        if i.opcode in ("partition-id", "replica-id") and self.module.replicas == 1:
            devices = self.module.devices
            return self.shaped(i.type, self.apart, np.arange(devices, dtype=np.uint32) * (i.opcode == "partition-id"))
        if i.opcode in _EVERY_DEVICE_ITS_OWN or _on_host(i):
            return self.shaped(i.type, self.apart)
        for name in filter(self.collective, _called(i)):
            self.run(self.module.computations[name], operands, context)
        numbers = [x.numbers for x in operands if isinstance(x, _Value) and x.numbers is not None]
        known = computed(i, numbers, self.module.devices) if len(numbers) == len(operands) else None
        return self.shaped(i.type, self.labels(operands), known)

    def labels(self, operands: tuple[Value, ...]) -> Labels:
        """On which devices all operands are the same."""
        found = _of(operands)
        return self.together if found is None else found

    def shaped(self, type_: str, labels: Labels, numbers: Numbers | None = None) -> Value:
        """A value of an HLO type, all parts the same on these devices; by its numbers, if these are known."""
        if type_.startswith("("):
            return tuple(self.shaped(part, labels) for part in split(type_.strip()[1:-1]))
        if numbers is None:
            return _Value(labels)
        return _Value(_labels(row.tobytes() for row in np.ascontiguousarray(numbers)), numbers)

    def loop(self, i: Instruction, start: Value, context: _Context) -> Value:
        """Interprets a loop to its fixed point, and returns its result."""
        test, body = (self.module.computations[loop_part(i, part)] for part in ("condition", "body"))
        now = start
        while True:
            steps = self.labels((self.run(test, (now,), context),))
            inner = context.within(steps, self.name(i))
            self.run(test, (now,), inner)
            after = _joined(now, self.run(body, (now,), inner))
            if after == now:
                return _refined(now, steps)
            now = after

    def conditional(self, i: Instruction, operands: tuple[Value, ...], context: _Context) -> Value:
        """Interprets every branch of a conditional, and returns the joined result."""
        predicate, names = operands[0], _called(i)
        taken = None if predicate.numbers is None else self.taken(predicate.numbers, len(names))
        found = []
        for k, name in enumerate(names):
            inner = context.within(predicate.labels, self.name(i))
            if taken is not None:
                inner = _Context(tuple(a if b == k else ABSENT for a, b in zip(inner.labels, taken, strict=True)), inner.control)
            found.append(self.run(self.module.computations[name], (operands[1 + k],), inner))
        return _refined(reduce(_joined, found), predicate.labels)

    def taken(self, predicate: Numbers, branches: int) -> list[int]:
        """Returns the branch of each device: the first of two if a predicate is true, the last if an index is out of range."""
        if predicate.dtype == bool:
            return [0 if yes else 1 for yes in predicate]
        return [int(k) if 0 <= k < branches else branches - 1 for k in predicate]

    def communicated(self, computation: Computation, i: Instruction, kind: str, labels: Labels, context: _Context) -> Value:
        """The result of a collective, which is noted if its devices may have parted."""
        every = groups(i, self.module.devices)
        waiting = (tuple(range(self.module.devices)),) if kind == "collective-permute" else every
        if parted := tuple(group for group in waiting if len({context.labels[d] for d in group}) > 1):
            self.found[computation.name, i.name] = Disagreement(kind, parted, self.source(i), _op_name(i), context.control)
        got: list[Any] = [("nothing", label) for label in labels]
        if kind == "collective-permute":
            got = ["nothing"] * len(labels)
            for source, target in every:
                got[target] = labels[source]
        else:
            for group in every:
                for place, device in enumerate(group):
                    own = place if kind not in ("all-reduce", "all-gather") else 0
                    got[device] = (tuple(labels[d] for d in group), own)
        return self.shaped(i.type, _labels(got)) if not i.opcode.endswith("-start") else _Value(_labels(got))

    def name(self, i: Instruction) -> str:
        """A conditional or a loop, for messages."""
        source = self.source(i)
        return f"the {i.opcode}{f' of {source}' if source else ''}"

    def source(self, i: Instruction) -> str:
        """The operator of a plan and the user's line that an instruction is of; else the line alone."""
        plans = re.findall(r"[\w.-]+ at [^/()]+:\d+", _op_name(i))
        return plans[-1] if plans else self.module.source(i)


def _called(i: Instruction) -> list[str]:
    """The computations that run as part of an instruction; of a reduction none, it has but a scalar function."""
    if i.opcode == "while":
        return [loop_part(i, part) for part in ("condition", "body")]
    runs = i.opcode in ("call", "fusion", "conditional", "async-start", "custom-call")
    return i.callees() if runs else []


def _op_name(i: Instruction) -> str:
    return i.attribute(r'op_name="((?:[^"\\]|\\.)*)"') or ""


def _on_host(i: Instruction) -> bool:
    """Whether the host computes an instruction's result, of which nobody knows whether it is the same for every device."""
    return i.opcode == "custom-call" and "callback" in (i.attribute(r'custom_call_target="([^"]*)"') or "")
