"""Measurement of the devices of this process: matrix products, memory, operators' overhead, and collectives.

Everything runs on all devices at once, because devices may share what they run on: virtual CPU devices share the host's
cores and memory. Each figure is the best of a few runs: other work on the host can only slow a run down. Collectives are measured
by `unity.exec.measure.collective_curves`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unity.exec.lowering import platform_of
from unity.exec.measure.collective_curves import RINGS, curves
from unity.exec.measure.timing import repetitions, seconds_of
from unity.machine.hardware import Curve, Level

JaxDevice: TypeAlias = Any  # jax.Device, which is no type to a type checker: jaxlib has no stubs

# float64 is left out: it needs jax_enable_x64, which is the user's to choose.
DTYPES = ("float32", "bfloat16", "float16")

_AXIS = "device"
_RUN, _MOST = 0.01, 1 << 20  # seconds that a run should take at least, and steps at most
_RUNS = 5
_STEPS = 0.8  # part of a run that its steps take at least
_MEMORY_BYTES = 2**24  # per device: beyond a core's own caches
_TOTAL_BYTES = 2**28  # of all devices together: there may be many virtual ones on a small host


@dataclass(frozen=True)
class Measured:
    """Figures of one device while all of them work, and of the link between them.

    Args:
        flops: FLOP/s of a dense matrix product, by dtype.
        bandwidth: bytes/s of memory, reading and writing counted together.
        launch: seconds per operator that has almost nothing to do.
        link_bandwidth: bytes/s per device in one direction, as in the ring formulas of `unity.machine.collectives`.
        link_latency: seconds per message, as there. Both are None for a single device.
        relative: for each collective, its time relative to these two figures, as in `hardware.Level`.
        curves: the time of each collective in groups of each size.
    """

    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    link_bandwidth: float | None
    link_latency: float | None
    relative: tuple[tuple[str, float, float], ...] = ()
    curves: tuple[Curve, ...] = ()


def measure(devices: Sequence[JaxDevice]) -> Measured:
    """Measure `devices`, all of this process and of one kind. Eight virtual devices on two cores take 25 seconds."""
    mesh = Mesh(np.array(devices), (_AXIS,))
    if len(devices) == 1:
        return Measured(_flops(mesh), _bandwidth(mesh), _launch(mesh), None, None)
    link = level("device", mesh.size, curves(devices))
    figures = link.bandwidth, link.latency, link.relative, link.curves
    return Measured(_flops(mesh), _bandwidth(mesh), _launch(mesh), *figures)


def between(hosts: Sequence[Sequence[JaxDevice]]) -> Level:
    """Measure the level "node" that joins hosts with equal numbers of devices. All their processes call this together.

    A group has one device of every host, and as many groups as a host has devices communicate at the same time.
    """
    devices = [device for column in zip(*hosts, strict=True) for device in column]
    return level("node", len(hosts), curves(devices, units=len(hosts)))


def level(name: str, size: int, measured: tuple[Curve, ...]) -> Level:
    """Return a level of `size` units with the figures that its collectives' curves give."""
    lines = {c.kind: (c.alpha, c.beta) for c in measured if c.size == size and not c.turned}
    bandwidth, latency = _link(size, lines)
    relative = tuple(
        (kind, alpha / (rounds * (size - 1) * latency), beta * size * bandwidth / (rounds * (size - 1)))
        for kind, rounds in RINGS.items()
        for alpha, beta in (lines[kind],)
    )
    return Level(name, size, bandwidth, latency, relative, measured)


def _flops(mesh: Mesh) -> dict[str, float]:
    # Large enough that a product takes far longer than its launch, small enough for hundreds of virtual devices on a
    # core.
    size_on_cpu = 512 if mesh.size <= 16 else 256
    size = size_on_cpu if platform_of(mesh) == "cpu" else 4096

    def step(x: jax.Array) -> jax.Array:
        return x @ x

    # Products of the identity stay the identity: no overflow, however many follow each other.
    eye = np.broadcast_to(np.eye(size, dtype=np.float32), (mesh.size, size, size))
    return {dtype: 2 * size**3 / _seconds_per_step(mesh, step, eye.astype(jnp.dtype(dtype))) for dtype in DTYPES}


def _bandwidth(mesh: Mesh) -> float:
    nbytes = min(_MEMORY_BYTES, _TOTAL_BYTES // mesh.size)

    def step(x: jax.Array) -> jax.Array:
        return x * 0.5 + 1

    seconds = _seconds_per_step(mesh, step, np.ones((mesh.size, nbytes // 4), np.float32))
    return 2 * nbytes / seconds


def _launch(mesh: Mesh) -> float:
    chain = 16

    def step(x: jax.Array) -> jax.Array:
        # Each product waits for the one before, and products are not fused with each other.
        for _ in range(chain):
            x = x @ x
        return x

    eye = np.broadcast_to(np.eye(8, dtype=np.float32), (mesh.size, 8, 8))
    return _seconds_per_step(mesh, step, eye) / chain


def _link(devices: int, lines: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    """Return the bandwidth and latency that fit the ring formulas to all-reduce and all-gather: the geometric mean of the two."""
    usual = [(RINGS[kind] * (devices - 1), *lines[kind]) for kind in ("all-reduce", "all-gather")]
    return (
        geometric_mean(messages / (devices * beta) for messages, _, beta in usual),
        geometric_mean(alpha / messages for messages, alpha, _ in usual),
    )


def _seconds_per_step(mesh: Mesh, step: Callable[[jax.Array], jax.Array], values: np.ndarray[Any, Any]) -> float:
    """Return the seconds of `step`, applied repeatedly to each device's row of `values` on all devices at once."""
    pair, steps = _timer(mesh, step, values)
    pairs = [pair() for _ in range(_RUNS)]
    return _difference((min(once for once, _ in pairs), min(twice for _, twice in pairs)), steps)


def _difference(pair: tuple[float, float], steps: int) -> float:
    """Return the seconds of a step, from those of some steps and of twice as many.

    The difference leaves out the call and the first touch of its memory, which are the smaller part of a run. A difference below
    `_STEPS` of a run is noise, and would make a busy machine look many times as fast as it is.
    """
    once, twice = pair
    return max(twice - once, _STEPS * twice / 2) / steps


def _timer(
    mesh: Mesh, step: Callable[[jax.Array], jax.Array], values: np.ndarray[Any, Any]
) -> tuple[Callable[[], tuple[float, float]], int]:
    """Return a function that times some steps and then twice as many, and the number of steps.

    The number of steps is an argument of one compiled loop, so that the compiler can neither unroll nor shorten it.
    """
    spec = PartitionSpec(_AXIS)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec)
    def run(steps: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, steps, lambda _, y: step(y), x[0])[None]

    x = jax.device_put(values, NamedSharding(mesh, spec))

    def seconds(steps: int) -> float:
        return seconds_of(lambda: run(np.int32(steps), x))

    seconds(1)  # compiles
    steps = repetitions(seconds, 2 * _RUN, _MOST)
    return lambda: (seconds(steps), seconds(2 * steps)), steps
