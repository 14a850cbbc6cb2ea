"""Measured times of operators on one kind of device: an immutable value that a machine may carry."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from unity.base.documents import Record, encoded, plain, refuse_unknown, typed
from unity.machine.hardware import MachineError

SCHEMA = 4  # of a profile's JSON; raised for a new way of measuring, too, so that older measurements are not used

Shapes = tuple[tuple[int, ...], ...]
Content = tuple[str, Shapes, tuple[bool, ...]]


@dataclass(frozen=True)
class Where:
    """The conditions of a measurement: the devices, how many work at once, on how many cores, and the software.

    Virtual devices share a host's cores, so their number and the cores' are part of it.
    """

    kind: str
    devices: int
    cores: int
    jax: str
    platform: str  # the driver's or the backend's own version

    @cached_property
    def key(self) -> str:
        """A text that equal conditions share."""
        return json.dumps(asdict(self), sort_keys=True)

    def __str__(self) -> str:
        return f"{self.devices} x {self.kind} ({self.cores} cores, jax {self.jax}, {self.platform})"


class Measurement(Record, array_like=True, dict=True):
    """The measured times of one operator on local shapes, run on all devices at once.

    Args:
        body: the hash of its program, which global shapes, dtypes and parameters are part of.
        kind: the class of operators that take similar times (`search.cost.profile_lookup.kind_of`).
        shapes: of its operands and then its results, on one device.
        differentiated: for each operand, whether a gradient flows back to it.
        work: FLOPs of products on one device.
        dtype: the dtype in which products are computed.
        nbytes: read or written on one device, of operands and results.
        zeroed: bytes of gradients on one device that are zeroed before rows are added to them.
        forward: median seconds, with the residuals written out.
        backward: median seconds from cotangents and residuals to the gradients, 0 if nothing is differentiated.
        spread: the larger interquartile range over the median, of both.
    """

    body: str
    kind: str
    shapes: Shapes
    differentiated: tuple[bool, ...]
    work: float
    dtype: str
    nbytes: float
    zeroed: float
    forward: float
    backward: float
    spread: float

    def __post_init__(self) -> None:
        for name in ("work", "nbytes", "zeroed", "forward", "backward", "spread"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise MachineError(f"a measurement's {name} must be a finite number, zero or above, got {value!r}")

    @property
    def content(self) -> Content:
        """The measured operator: its program, shapes, and differentiated operands."""
        return self.body, self.shapes, self.differentiated

    @cached_property
    def key(self) -> str:
        """A hash of `content`."""
        return hashlib.sha256(repr(self.content).encode()).hexdigest()[:32]

    @property
    def count(self) -> int:
        """The number of operands with a gradient."""
        return sum(self.differentiated)


@dataclass(frozen=True, eq=False)
class Profile:
    """All measurements on some devices, compared by content."""

    where: Where
    measurements: tuple[Measurement, ...] = field(repr=False)

    @cached_property
    def key(self) -> str:
        """A hash of the content, whatever the order of measuring."""
        rows = sorted(map(encoded, self.measurements))
        return hashlib.sha256(b"\n".join([self.where.key.encode(), *rows])).hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profile) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __len__(self) -> int:
        return len(self.measurements)

    @cached_property
    def exact(self) -> Mapping[Content, Measurement]:
        """The measurements by operator."""
        return {m.content: m for m in self.measurements}

    @cached_property
    def alike(self) -> Mapping[tuple[str, tuple[bool, ...]], tuple[Measurement, ...]]:
        """The measurements of each program on several shapes, in a fixed order."""
        groups: dict[tuple[str, tuple[bool, ...]], list[Measurement]] = {}
        for m in sorted(self.measurements, key=lambda m: (m.work, m.nbytes, m.shapes)):
            groups.setdefault((m.body, m.differentiated), []).append(m)
        return {k: tuple(v) for k, v in groups.items()}

    def of(self, bodies: Collection[str]) -> Profile:
        """Return the profile with the measurements of some programs only."""
        return Profile(self.where, tuple(m for m in self.measurements if m.body in bodies))

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON data."""
        return {"schema": SCHEMA, **plain(self)}

    @staticmethod
    def from_json(data: Any) -> Profile:
        """Read what `to_json` returned. Raises Misfit if it is damaged, and MachineError if it has another schema."""
        fields = dict(typed(data, dict))
        if (schema := fields.pop("schema", None)) != SCHEMA:
            raise MachineError(f"the profile's schema is version {schema!r}, this release reads {SCHEMA}: measure again")
        profile = typed(fields, Profile)
        refuse_unknown(profile, fields)
        return profile
