"""Exchange of small data between the processes of JAX's runtime. All processes must call these functions at the same point.

Bytes go through `multihost_utils` as uint8, because JAX would round wider numbers. The exchange runs outside of any trace: a plan
may be called for the first time while an outer function is traced.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from unity.base.errors import PlanError


def several() -> bool:
    """Return whether this program runs as several processes, without starting a backend."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def shared(devices: Collection[Any]) -> bool:
    """Return whether devices belong to several processes. False if they are not present, as those of a machine planned for."""
    return several() and len({d.process_index for d in devices}) > 1 and set(devices) <= set(jax.devices())


def exchanged(text: str) -> tuple[str, ...]:
    """Return the text of every process, in the order of processes."""
    data = text.encode()
    lengths = [struct.unpack("<q", one)[0] for one in _gathered(struct.pack("<q", len(data)))]
    rows = _gathered(data.ljust(max(lengths), b"\0"))
    return tuple(row[:n].decode() for row, n in zip(rows, lengths, strict=True))


def agreed(figure: float) -> float:
    """Return the first process's figure, so that all processes base a decision on the same measurement."""
    return struct.unpack("<d", _gathered(struct.pack("<d", figure))[0])[0] if several() else figure


def same(text: str) -> bool:
    """Return whether all processes passed the same text."""
    return not several() or len(set(exchanged(text))) == 1


def from_first(text: str) -> str:
    """Return the first process's text."""
    (length,) = struct.unpack("<q", _gathered(struct.pack("<q", len(text.encode())))[0])
    own = text.encode() if jax.process_index() == 0 else b""
    with jax.ensure_compile_time_eval():
        sent = multihost_utils.broadcast_one_to_all(np.frombuffer(own[:length].ljust(max(length, 1), b"\0"), np.uint8))
    return np.asarray(sent).tobytes()[:length].decode()


def none_failed(problem: str) -> None:
    """Raise PlanError in every process, naming the first that passes a problem. An empty text stands for no problem."""
    for process, reason in enumerate(exchanged(problem)):
        if reason:
            raise PlanError(f"process {process}: {reason}")


def check_alike(facts: Mapping[str, str]) -> None:
    """Raise PlanError in every process if they differ in a fact or in the version of JAX, naming the first difference."""
    facts = {"the version of JAX": jax.__version__, "the version of jaxlib": version("jaxlib"), **facts}
    theirs = [dict(line.split("\t", 1) for line in one.split("\n")) for one in exchanged(_lines(facts))]
    for fact in facts:
        values = [one.get(fact, "nothing") for one in theirs]
        if len(set(values)) > 1:
            raise PlanError(f"the processes differ in {fact}:\n{_by_process(values)}\n    {ALIKE}")


ALIKE = "All processes must run the same program, with the same versions, on the same arguments. (docs: hosts#the-same-everywhere)"


def _lines(facts: Mapping[str, str]) -> str:
    return "\n".join(f"{name}\t{' '.join(value.split())}" for name, value in facts.items())


def _by_process(values: Iterable[str]) -> str:
    """List the processes of each value: "    processes 0, 1, 2: 0.10.2"."""
    processes: dict[str, list[int]] = {}
    for process, value in enumerate(values):
        processes.setdefault(value, []).append(process)
    return "\n".join(f"    process{'es' * (len(p) > 1)} {', '.join(map(str, p))}: {value}" for value, p in processes.items())


def check_devices(devices: Iterable[Any]) -> None:
    """Raise PlanError if processes have different numbers of devices. Every process sees all devices, so nothing is exchanged."""
    numbers: dict[int, int] = {}
    for device in devices:
        numbers[device.process_index] = numbers.get(device.process_index, 0) + 1
    if len(set(numbers.values())) > 1:
        counts = [f"{n} devices" for _, n in sorted(numbers.items())]
        raise PlanError(
            f"the processes have different numbers of devices:\n{_by_process(counts)}\n    Give each the same number, or"
            " leave out the odd ones. (docs: hosts#the-same-everywhere)"
        )


def _gathered(data: bytes) -> list[bytes]:
    """Gather equally many bytes from every process."""
    with jax.ensure_compile_time_eval():
        rows = multihost_utils.process_allgather(np.frombuffer(data or b"\0", np.uint8))
    return [row.tobytes()[: len(data)] for row in np.asarray(rows)]
