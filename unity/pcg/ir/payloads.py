"""Payloads: the data of a node besides its program, operands and types, such as the length of a scan. Each kind has its own class.

Files, texts and content hashes write a payload as *attributes*: a dictionary without fields that are None, in which a tuple of
names or numbers is one text, such as "n0 n1".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, Literal, TypeAlias

from jax.sharding import NamedSharding
from msgspec import structs

from unity.base.documents import Misfit, Natural, Positive, Record, typed

Names: TypeAlias = tuple[str, ...]
Numbers: TypeAlias = tuple[Natural, ...]


class Recompute(IntEnum):
    """The part of a node that the backward pass recomputes instead of keeping it: nothing, its inner values, or all of it."""

    NOTHING = 0
    INNER = 1
    WHOLE = 2


class ScheduleKind(StrEnum):
    """The schedule of a pipeline (`unity.pcg.parallel.stages`), by the name that users pass."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    TWO_BW = "2bw"

    @property
    def label(self) -> str:
        """The schedule's name in texts."""
        return "GPipe" if self == ScheduleKind.GPIPE else self.upper()


class Payload(Record):
    """The data of a node of some kind."""

    @property
    def attributes(self) -> dict[str, Any]:
        """The payload as attributes."""
        pairs = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {name: _plain(v) for name, v in pairs if v is not None}


class Input(Payload):
    """An input of a graph: its number, and its name, which is the path of an argument. Only the number is part of the content.

    Attributes:
        state_on_host: of a weight, that the search put the optimizer's state in the memory of the host.
    """

    index: Natural | None = None
    name: str | None = None
    state_on_host: bool | None = None


class PackedPart(Payload):
    """An operator that removes the padding of a packed weight (`unity.pcg.capture.group_slots`)."""

    part: Literal[True] = True


class Remat(Payload):
    """A nested graph that the backward pass recomputes, as `jax.checkpoint` does. The policy is a text."""

    prevent_cse: bool
    policy: str | None = None


class Scan(Payload):
    """A loop. Its operands are constants, the carry, and stacks of which each step reads its slice.

    Attributes:
        loss: for a loop over micro-batches whose backward pass follows each step at once, the number of the only result that has a
            gradient: a scalar to which each step adds a term (`unity.exec.accumulated_gradients`).
    """

    length: Natural
    reverse: bool
    consts: Natural
    carry: Natural
    unroll: Positive
    loss: Natural | None = None

    read: ClassVar[int] = 0  # see `Pipeline`


class Pipeline(Payload):
    """A scan whose steps are divided among stages (`unity.pcg.parallel.stages`).

    Attributes:
        consts: the number of operands without samples that every step reads.
        read: the number of operands with samples that every step reads.
        carry: the number of carried operands.
        unroll: the scan's.
        along: the names of the mesh axes along which the stages lie.
        stages: their number.
        micro_batches: the number of micro-batches.
        steps: the number of steps of the scan.
        length: the number of steps that a device runs, idle ones included.
        samples: the dimension of the samples in each operand that has them.
        entering: the carried operands that the first stage receives; None for all.
        leaving: the carried operands whose last values something reads; None for all.
        inactive: operands with samples, by position, whose gradient is always zero, as it is stopped; None for none.
        schedule: the schedule; None for GPipe's.
    """

    consts: Natural
    read: Natural
    carry: Natural
    unroll: Positive
    along: Names
    stages: Positive
    micro_batches: Positive
    steps: Positive
    length: Natural
    samples: Numbers
    entering: Numbers | None = None
    leaving: Numbers | None = None
    inactive: Numbers | None = None
    schedule: ScheduleKind | None = None


class PipelineTail(Payload):
    """The program after a pipeline's last stage, micro-batch by micro-batch, with fields as the pipeline's.

    Attributes:
        arriving: the number of operands that are results of the pipeline.
        loss: the number of the result that is differentiated.
    """

    consts: Natural
    read: Natural
    arriving: Natural
    carry: Natural
    along: Names
    stages: Positive
    micro_batches: Positive
    steps: Positive
    schedule: ScheduleKind
    length: Natural
    loss: Natural
    samples: Numbers


class Stages(Payload):
    """The stages of a pipeline that differ in their operators (`unity.pcg.parallel.branches`).

    Attributes:
        along: the names of the mesh axes along which the stages lie.
        packed: the operands with a slice for each stage.
        weight: the slowest stage's share of the time of all.
    """

    along: Names
    packed: Numbers
    weight: float


class Branches(Payload):
    """Branches on groups of devices (`unity.pcg.parallel.branches`), with fields as those of `Stages` for groups.

    Attributes:
        groups: the group that computes each result.
        region: the number of the region among those of the program.
    """

    along: Names
    groups: Numbers
    packed: Numbers
    weight: float
    region: Natural


class Sharded(Payload):
    """Sharding constraints of a value and of its cotangent (`unity.exec.sharding_constraints`), of a form that no file has.

    `name` is theirs in compiled programs (`unity.pcg.ir.user_lines.label`).
    """

    forward: NamedSharding
    backward: NamedSharding
    name: str


LoopPayload: TypeAlias = Scan | Pipeline | PipelineTail
PAYLOADS: Mapping[str, type[Payload]] = {  # by kind; an operator has no payload, or is a `PackedPart`
    "input": Input,
    "scan": Scan,
    "remat": Remat,
    "pipeline": Pipeline,
    "tail": PipelineTail,
    "branches": Branches,
    "stages": Stages,
    "sharded": Sharded,
}
OPTIONAL = (Input, PackedPart)  # a node of their kinds may have no payload
_SEVERAL = (Names, Names | None, Numbers, Numbers | None)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value) if isinstance(value, ScheduleKind) else value


def payload_of(kind: str, attributes: Mapping[str, Any]) -> Payload | None:
    """Return the payload of a node of a kind from its attributes. Raises Misfit if they are not those of the kind."""
    payload = PAYLOADS.get(kind, PackedPart)
    if not attributes and payload in OPTIONAL:
        return None
    values = dict(attributes)
    for field in structs.fields(payload):
        if field.type in _SEVERAL and field.name in values:
            values[field.name] = _split(values[field.name], field.type in _SEVERAL[2:], field.name)
    return typed(values, payload)


def _split(text: Any, numbers: bool, name: str) -> list[Any]:
    """Return the words of a text, as numbers if they should be. Raises Misfit if they are not."""
    if not isinstance(text, str) or (numbers and not all(re.fullmatch("[0-9]{1,18}", word) for word in text.split())):
        raise Misfit(f"expected {'numbers' if numbers else 'names'} in a text, got {text!r}", f".{name}")
    return list(map(int, text.split())) if numbers else text.split()
