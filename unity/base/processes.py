"""Small data between the processes of JAX's runtime. All processes call these functions at the same point of their program.

Bytes are exchanged through `multihost_utils`, as uint8, because JAX would round wider numbers. A plan may be met for the first
time while an outer function is traced: what is exchanged must not become part of that trace.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from unity.base.errors import PlanError


def several() -> bool:
    """Whether this program runs as several processes. Starts no backend where JAX's distributed runtime was not initialized."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def exchanged(text: str) -> tuple[str, ...]:
    """What every process gave, in the order of processes."""
    data = text.encode()
    lengths = [struct.unpack("<q", one)[0] for one in _gathered(struct.pack("<q", len(data)))]
    rows = _gathered(data.ljust(max(lengths), b"\0"))
    return tuple(row[:n].decode() for row, n in zip(rows, lengths, strict=True))


def agreed(figure: float) -> float:
    """The first process's figure: what is decided by something measured must be decided alike everywhere."""
    return struct.unpack("<d", _gathered(struct.pack("<d", figure))[0])[0] if several() else figure


def same(text: str) -> bool:
    """Whether all processes gave the same."""
    return not several() or len(set(exchanged(text))) == 1


def from_first(text: str) -> str:
    """What the first process gave."""
    (length,) = struct.unpack("<q", _gathered(struct.pack("<q", len(text.encode())))[0])
    own = text.encode() if jax.process_index() == 0 else b""
    with jax.ensure_compile_time_eval():
        sent = multihost_utils.broadcast_one_to_all(np.frombuffer(own[:length].ljust(max(length, 1), b"\0"), np.uint8))
    return np.asarray(sent).tobytes()[:length].decode()


def none_failed(problem: str) -> None:
    """Raises PlanError in every process if any of them has a problem, which says whose it is."""
    for process, found in enumerate(exchanged(problem)):
        if found:
            raise PlanError(f"process {process}: {found}")


def check_alike(facts: Mapping[str, str]) -> None:
    """Raises PlanError in every process if they differ in any of these facts, or in JAX; names the first that is different."""
    facts = {"the version of JAX": jax.__version__, "the version of jaxlib": version("jaxlib"), **facts}
    theirs = [dict(line.split("\t", 1) for line in one.split("\n")) for one in exchanged(_lines(facts))]
    for fact in facts:
        said = [one.get(fact, "nothing") for one in theirs]
        if len(set(said)) > 1:
            raise PlanError(f"the processes differ in {fact}:\n{_whose(said)}\n    {ALIKE}")


ALIKE = "All processes must run the same program, with the same versions, on the same arguments. (docs: hosts#the-same-everywhere)"


def _lines(facts: Mapping[str, str]) -> str:
    return "\n".join(f"{name}\t{' '.join(said.split())}" for name, said in facts.items())


def _whose(said: Iterable[str]) -> str:
    """Who says what: "    processes 0, 1, 2: 0.10.2"."""
    whose: dict[str, list[int]] = {}
    for process, one in enumerate(said):
        whose.setdefault(one, []).append(process)
    return "\n".join(f"    process{'es' * (len(p) > 1)} {', '.join(map(str, p))}: {one}" for one, p in whose.items())


def check_devices(devices: Iterable[Any]) -> None:
    """Raises PlanError if processes have different numbers of devices, which all see alike without a word exchanged."""
    numbers: dict[int, int] = {}
    for device in devices:
        numbers[device.process_index] = numbers.get(device.process_index, 0) + 1
    if len(set(numbers.values())) > 1:
        said = [f"{n} devices" for _, n in sorted(numbers.items())]
        raise PlanError(
            f"the processes have different numbers of devices:\n{_whose(said)}\n    Give each the same number, or leave out the odd"
            " ones. (docs: hosts#the-same-everywhere)"
        )


def _gathered(data: bytes) -> list[bytes]:
    """The same number of bytes from every process."""
    with jax.ensure_compile_time_eval():
        rows = multihost_utils.process_allgather(np.frombuffer(data or b"\0", np.uint8))
    return [row.tobytes()[: len(data)] for row in np.asarray(rows)]
