"""FlexFlow's configurations (section 4): for each operator the degrees of its dimensions, and a device for every piece."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from math import prod

from unity.baselines.flexflow.strategy.pieces import Degrees, largest_degree, split_shape
from unity.pcg.ir.graph import Node
from unity.search.simulator.tasks import SimulationError
from unity.search.simulator.topology import Topology


@dataclass(frozen=True)
class ParallelConfig:
    """The number of equal parts of each dimension (`pieces.split_shape`), and the device of each piece, in row-major order."""

    degrees: Degrees
    devices: tuple[int, ...]

    @property
    def pieces(self) -> int:
        return prod(self.degrees)


def check_degrees(node: Node, degrees: Degrees) -> None:
    """Raise SimulationError unless an operator can be split into these degrees."""
    where, shape = node.source or node.kind, split_shape(node)
    if len(degrees) != len(shape):
        raise SimulationError(f"{where}: degrees {degrees} for {len(shape)} dimensions")
    for dim, degree in enumerate(degrees):
        if degree < 1 or (degree > 1 and largest_degree(node, dim) % degree):
            largest = largest_degree(node, dim)
            what = f"at most {largest} equal parts, in a number that divides that" if largest > 1 else "no parts"
            raise SimulationError(f"{where}: dimension {dim} of {shape} is split {degree} times; it has {what}")


def check_placed(node: Node, config: ParallelConfig, topology: Topology) -> None:
    """Raise SimulationError unless every piece has a device, MachineError unless the devices exist."""
    if len(config.devices) != config.pieces:
        raise SimulationError(f"{node.source or node.kind}: {len(config.devices)} devices for {config.pieces} pieces")
    if not topology.has(config.devices):
        topology.check_devices(config.devices, node.source or node.kind)


def on_one(node: Node, device: int = 0) -> ParallelConfig:
    """Return the configuration that places an operator as a whole on one device."""
    return ParallelConfig((1,) * len(split_shape(node)), (device,))


def data_parallel(node: Node, batch: int, devices: int) -> ParallelConfig:
    """Split the first dimension that is a multiple of the batch over as many devices as divide it.

    An operator without such a dimension is placed on device 0.

    Args:
        node: the operator.
        batch: the number of samples, by which the dimension is recognized (merged with others, it is their outer part).
        devices: the number of devices.
    """
    shape = split_shape(node)
    for dim, n in enumerate(shape):
        if n % batch == 0 and (degree := _divisor(largest_degree(node, dim), batch, devices)) > 1:
            return ParallelConfig(tuple(degree if k == dim else 1 for k in range(len(shape))), tuple(range(degree)))
    return on_one(node)


def _divisor(size: int, batch: int, limit: int) -> int:
    return max(d for d in range(1, limit + 1) if size % d == 0 and batch % d == 0)


def drawn(node: Node, devices: int, rng: random.Random) -> ParallelConfig:
    """Draw a configuration: degrees evenly among the possible ones, then devices that are all different."""
    return drawn_of(possible(node, devices), devices, rng)


def drawn_of(possible: Sequence[Degrees], devices: int, rng: random.Random) -> ParallelConfig:
    """Draw a configuration with one of the given degrees."""
    degrees = rng.choice(possible)
    return ParallelConfig(degrees, tuple(rng.sample(range(devices), prod(degrees))))


def every_config(node: Node, devices: int) -> Iterator[ParallelConfig]:
    """Yield all configurations on devices that are all different."""
    for degrees in possible(node, devices):
        for chosen in permutations(range(devices), prod(degrees)):
            yield ParallelConfig(degrees, chosen)


def possible(node: Node, devices: int) -> tuple[Degrees, ...]:
    """Return all degrees that need at most `devices` devices."""
    return _within(tuple(largest_degree(node, dim) for dim in range(len(split_shape(node)))), devices)


@lru_cache(maxsize=4096)
def _within(sizes: tuple[int, ...], limit: int) -> tuple[tuple[int, ...], ...]:
    if not sizes:
        return ((),)
    return tuple((d, *rest) for d in _divisors(sizes[0], limit) for rest in _within(sizes[1:], limit // d))


def _divisors(size: int, limit: int) -> Iterable[int]:
    return (d for d in range(1, min(size, limit) + 1) if size % d == 0)
