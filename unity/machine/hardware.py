"""The parts of a machine: its kind of device, and the levels of network that join the devices."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from unity.base.errors import UnityError

# For a dtype without units: the dtype in which a device computes instead, and the fraction of that dtype's rate. Followed
# until a dtype has a rate; a dtype that is not listed runs at the float32 rate. Eight-bit floats are widened to bfloat16,
# bfloat16 and float16 to float32; float64 is assumed to run at half the rate of float32, as it usually does.
_COMPUTED_IN: Mapping[str, tuple[str, float]] = {
    "float8_e4m3fn": ("bfloat16", 1.0),
    "float8_e5m2": ("bfloat16", 1.0),
    "bfloat16": ("float32", 1.0),
    "float16": ("float32", 1.0),
    "float64": ("float32", 0.5),
    "complex128": ("float64", 1.0),
}


T = TypeVar("T", float, np.ndarray)


class MachineError(UnityError, ValueError):
    """A machine's description is wrong, or names an unknown device, level or axis."""

    docs = "machines"


def check_positive(where: str, value: object, unit: str) -> None:
    """Raise MachineError unless `value` is a finite number of `unit` above zero. `where` names the field."""
    if not _is_finite(value) or value <= 0:  # pyright: ignore[reportOperatorIssue]
        raise MachineError(f"{where} must be a finite number of {unit} above zero, got {value!r}")


def check_not_negative(where: str, value: object, unit: str) -> None:
    """Raise MachineError unless `value` is a finite number of `unit`, zero or above."""
    if not _is_finite(value) or value < 0:  # pyright: ignore[reportOperatorIssue]
        raise MachineError(f"{where} must be a finite number of {unit}, zero or above, got {value!r}")


def check_count(where: str, value: object, unit: str) -> None:
    """Raise MachineError unless `value` is an integer above zero."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise MachineError(f"{where} must be a whole number of {unit} above zero, got {value!r}")


def check_name(where: str, value: object) -> None:
    """Raise MachineError unless `value` starts with a lower-case letter, by which mesh axes are named."""
    if not isinstance(value, str) or value[:1] not in set(string.ascii_lowercase):
        raise MachineError(f"{where} must be a name that starts with a lower-case letter, got {value!r}")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


ALIGNMENT = 16
"""Bytes: tensor cores load from addresses that are multiples of it."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or one share of a host's cores.

    Args:
        name: what reports call it.
        flops: peak FLOP/s of dense matrix products, by the dtype of the operands, as `jax.numpy` computes them by
            default (float32 on an A100 means tensorfloat32). Must hold "float32".
        memory: bytes that a program can use.
        bandwidth: bytes/s of its memory, reading and writing counted together.
        efficiency: part of the peak that a large dense matrix product reaches, above 0 and at most 1.
        launch: seconds of fixed overhead per operator.
        misaligned: how many times as long the arithmetic of a matrix product takes if the last dimension of one of its arrays is
            not a multiple of `ALIGNMENT` bytes, at least 1.

    Raises:
        MachineError: a figure is missing, not positive, or not finite.
    """

    name: str
    # A mapping has no hash, so the device's hash leaves it out: machines are keys of caches.
    flops: Mapping[str, float] = field(hash=False)
    memory: int
    bandwidth: float
    efficiency: float
    launch: float
    misaligned: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise MachineError(f"device.name must be a non-empty string, got {self.name!r}")
        if not isinstance(self.flops, Mapping) or "float32" not in self.flops:
            raise MachineError(f"device.flops must map dtype names to FLOP/s and hold 'float32', got {self.flops!r}")
        for dtype, rate in self.flops.items():
            check_positive(f"device.flops[{dtype!r}]", rate, "FLOP/s")
        check_count("device.memory", self.memory, "bytes")
        check_positive("device.bandwidth", self.bandwidth, "bytes/s")
        check_positive("device.efficiency", self.efficiency, "parts of the peak")
        if self.efficiency > 1:
            raise MachineError(f"device.efficiency is a part of the peak and at most 1, got {self.efficiency!r}")
        check_not_negative("device.launch", self.launch, "seconds")
        check_positive("device.misaligned", self.misaligned, "times as long")
        if self.misaligned < 1:
            raise MachineError(f"device.misaligned is how many times as long, and at least 1, got {self.misaligned!r}")
        object.__setattr__(self, "flops", dict(self.flops))  # a copy, so that the caller's dict cannot change a machine

    def flops_of(self, dtype: object) -> float:
        """Return the peak FLOP/s for operands of `dtype`: a name ("bfloat16"), a NumPy or JAX dtype, or a scalar type.

        A dtype without a figure runs at the rate of the dtype that it is computed in: eight-bit floats as bfloat16,
        bfloat16 and float16 as float32, float64 at half of float32, complex128 as float64, anything else as float32.
        """
        name, part = _dtype_name(dtype), 1.0
        while name not in self.flops:
            name, slower = _COMPUTED_IN.get(name, ("float32", 1.0))
            part *= slower
        return part * self.flops[name]


def _dtype_name(dtype: object) -> str:
    if isinstance(dtype, str):
        return dtype
    # JAX's extended dtypes (random keys) are not NumPy dtypes, but have a name as well.
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else np.dtype(dtype).name  # pyright: ignore[reportArgumentType, reportCallIssue]


@dataclass(frozen=True)
class HostLink:
    """The link between each device and the memory of its host, which values that are offloaded cross.

    Args:
        bandwidth: bytes/s per *device*, in one direction, when all devices use their links at once.
        latency: seconds per transfer.

    Raises:
        MachineError: a figure is missing, negative, or not finite.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        check_positive("host.bandwidth", self.bandwidth, "bytes/s")
        check_not_negative("host.latency", self.latency, "seconds")

    def seconds(self, nbytes: T) -> T:
        """Return the seconds of a transfer, or of several in an array."""
        return self.latency + nbytes / self.bandwidth  # pyright: ignore[reportReturnType]

    def there_and_back(self, nbytes: T) -> T:
        """Return the seconds of a transfer and of its return."""
        return 2 * self.seconds(nbytes)  # pyright: ignore[reportReturnType, reportOperatorIssue]


@dataclass(frozen=True)
class Curve:
    """The measured line of a collective in groups of one size on one level, while all groups of that size communicate at once.

    Args:
        kind: the collective, by XLA's name.
        size: devices in a group.
        alpha: seconds with few bytes.
        beta: seconds for each byte of the full side on one device.
        error: the root mean square of the relative deviations of the points from the line `alpha + beta * nbytes`.
        points: the measured (bytes, seconds), for reports.
        turned: whether the tensor is gathered or scattered along another dimension than its first (see `machine.collectives`).

    Raises:
        MachineError: a figure is missing, not positive, or not finite.
    """

    kind: str
    size: int
    alpha: float
    beta: float
    error: float = 0.0
    points: tuple[tuple[int, float], ...] = field(default=(), hash=False)  # hashes of machines are computed often
    turned: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            raise MachineError(f"a curve's kind must be a collective's name, got {self.kind!r}")
        where = f"curve of {self.kind}"
        check_count(f"{where}: size", self.size, "devices")
        check_not_negative(f"{where} in groups of {self.size}: alpha", self.alpha, "seconds")
        check_positive(f"{where} in groups of {self.size}: beta", self.beta, "seconds per byte")
        check_not_negative(f"{where} in groups of {self.size}: error", self.error, "parts")
        for nbytes, seconds in self.points:
            check_count(f"{where} in groups of {self.size}: a point", nbytes, "bytes")
            check_positive(f"{where} in groups of {self.size}: a point", seconds, "seconds")


@dataclass(frozen=True)
class Protocol:
    """A way in which a library of collectives passes bytes over a level's links: in short steps, or with the whole bandwidth.

    Args:
        name: the library's name for it. Along all levels that a group crosses, it uses one protocol.
        start: seconds before the first step, the launch of the kernel included.
        step: seconds of a step of a ring.
        share: the part of the level's bandwidth that it reaches.
        most: bytes/s that a group reaches at most, however fast the links are; None if nothing else limits it.
        least_step: seconds that each step of a ring that crosses this level takes at least, inside of the units too.
        tree_step: seconds of a step between two units in a tree of all units, which all-reduces can take in place of a ring; None
            where there are no trees, as inside of nodes.
        tree_share: the part of the level's bandwidth that a tree reaches.

    Raises:
        MachineError: a figure is missing, negative, or not finite, or a share is above 1.
    """

    name: str
    start: float
    step: float
    share: float = 1.0
    most: float | None = None
    least_step: float = 0.0
    tree_step: float | None = None
    tree_share: float = 1.0

    def __post_init__(self) -> None:
        where = f"protocol {self.name!r}"
        for field_name, seconds in (("start", self.start), ("step", self.step), ("least_step", self.least_step)):
            check_not_negative(f"{where}: {field_name}", seconds, "seconds")
        if self.tree_step is not None:
            check_not_negative(f"{where}: tree_step", self.tree_step, "seconds")
        for field_name, share in (("share", self.share), ("tree_share", self.tree_share)):
            check_positive(f"{where}: {field_name}", share, "times the bandwidth")
            if share > 1:
                raise MachineError(f"{where}: {field_name} must be a part of the bandwidth, at most 1, got {share!r}")
        if self.most is not None:
            check_positive(f"{where}: most", self.most, "bytes/s")


@dataclass(frozen=True)
class Level:
    """One level of the network: it joins `size` units of the next inner level, or `size` devices if it is the
    innermost.

    Args:
        name: what it joins, in lower case ("node", "socket", "device"). Its first letter names the level's mesh axes.
        size: how many units it joins.
        bandwidth: bytes/s per *device*, in one direction, when all devices use the level at once. Several devices that
            share a network card each count their share: one 12.5 GB/s card in a node of 8 devices is 1.5625e9. A group
            that has m members in a node has m shares of that node's cards (see `machine.collectives`).
        latency: seconds per message: of all-to-alls and permutes, and of a step where no protocol says otherwise.
        relative: for each kind of collective that was measured on the whole level: its XLA name, and the factors by which alpha
            and beta exceed the formulas of `machine.collectives`.
        curves: the collectives that were measured in groups on this level alone. They take precedence over `relative`.
        protocols: the ways in which gathers, reduce-scatters and all-reduces may pass bytes over this level. Without any, it takes
            `latency` for a step and reaches the bandwidth in all protocols of the group's other levels.

    Raises:
        MachineError: a figure is missing, negative, or not finite.
    """

    name: str
    size: int
    bandwidth: float
    latency: float
    relative: tuple[tuple[str, float, float], ...] = ()
    curves: tuple[Curve, ...] = ()
    protocols: tuple[Protocol, ...] = ()

    def __post_init__(self) -> None:
        check_name("level.name", self.name)
        check_count(f"level {self.name!r}: size", self.size, "units")
        check_positive(f"level {self.name!r}: bandwidth", self.bandwidth, "bytes/s")
        check_not_negative(f"level {self.name!r}: latency", self.latency, "seconds")
        for kind, alpha, beta in self.relative:
            check_positive(f"level {self.name!r}: relative {kind}", alpha, "times")
            check_positive(f"level {self.name!r}: relative {kind}", beta, "times")
        if not all(isinstance(protocol, Protocol) for protocol in self.protocols):
            raise MachineError(f"level {self.name!r}: protocols must be unity.Protocol, got {self.protocols!r}")
        if len({protocol.name for protocol in self.protocols}) < len(self.protocols):
            raise MachineError(f"level {self.name!r}: two protocols have one name; rename all but one")

    def measured(self, kind: str) -> tuple[float, float]:
        """Return the factors by which a collective's alpha and beta exceed the formulas, (1, 1) if it was not measured."""
        return next(((alpha, beta) for name, alpha, beta in self.relative if name == kind), (1.0, 1.0))

    def curve(self, kind: str, size: int, turned: bool = False) -> Curve | None:
        """Return the measured curve of a collective in groups of `size` devices, or None."""
        return next((c for c in self.curves if (c.kind, c.size, c.turned) == (kind, size, turned)), None)
