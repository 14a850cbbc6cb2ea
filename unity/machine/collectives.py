"""Prices of collectives on a machine: seconds = alpha + beta * bytes, over any set of mesh axes.

**Bytes** are those of the full side on one device: the buffer of an all-reduce, the gathered output of an all-gather, the input of
a reduce-scatter, the local buffer of an all-to-all, the sent buffer of a collective-permute.

**One level**, k devices, n bytes, B bytes/s per device, L seconds per message: ring algorithms.

    all-gather, reduce-scatter    (k-1) L + (k-1)/k n/B
    all-reduce                    both, one after the other: twice that
    all-to-all                    (k-1) L + (k-1)/k n/B
    collective-permute            L + n/B

**Shared cards.** `Level.bandwidth` is a device's share when all devices of the machine use the level at once. In an SPMD program
they do: a collective over the axes of the nodes runs in many groups at the same time, which together contain all devices of a node.
So a group with m members in each node has m shares of the node's cards, and no more even if the other groups are idle. Therefore a
larger group can be cheaper: an all-reduce of n bytes over the nodes alone sends n bytes through one share; over the nodes and all
devices of a node, it sends n bytes through all shares.

**Several levels.** The group has k_i units on level i (B_i, L_i), and m_i of its devices in each unit: the product of the k_j
further inside.

- *flat*: one ring over all k devices. On level i all bytes of the ring leave a unit through its m_i shares, and the slowest level
  limits the ring: an all-gather has beta (k-1)/k / min_i(m_i B_i).
- *hierarchical*: an all-gather goes through the levels one after the other from the outside in, a reduce-scatter from the inside
  out, and level i carries n/m_i of the bytes: beta is the sum over i of (k_i - 1)/k_i / (m_i B_i).

Beta is the smaller of the two. Alpha is always that of the hierarchical algorithm, the sum over i of (k_i - 1) L_i, which is the
smaller one: libraries choose the algorithm by size, so few bytes go the way of few messages, and many bytes the way of most
bandwidth. The line is exact at both ends, and too low, by less than a factor of two, around the size at which the choice changes.

In an all-to-all each byte crosses only the level at which its sender and its receiver part, so beta is the sum over i of
(k_i - 1)/k_i / (k_1 ... k_(i-1) B_i); level by level, it takes the same alpha. A permute is as slow as the slowest of the levels.

**Measurements.** A measured level has a line for each kind of collective and size of group (`Level.curves`), fitted to what they
took while all groups of that size communicated at once. It is the price of a group on that level alone. For other sizes, and for
groups on several levels, the formulas are multiplied by the factors measured for each kind on the outermost of the group's levels
(`Level.relative`): on virtual CPU devices, for example, an all-reduce is faster than a reduce-scatter and an all-gather.

**Launches.** The device's `launch` is added to alpha (a measured line includes it). So of two ways that take equally long on the
wire, such as an all-reduce, or a reduce-scatter and a later all-gather, the one with fewer collectives is faster.

**Merging.** The all-reduces of arguments' gradients wait for nothing and nothing waits for them, so XLA merges them: on CPUs all
that are over the same devices, on GPUs up to tens of megabytes. Their bytes are priced, but not alpha, which they share
(`pcg.parallel.traffic.Collective.merged`, `machine.resharding_tables.Changes.merged`).

**Turning.** A tensor that is gathered or scattered along another dimension than its first is transposed: it is read and written
once more, by one more kernel. (An all-to-all always transposes.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from unity.machine.hardware import Level, MachineError
from unity.machine.machine import Machine
from unity.pcg.types.axis import Axis

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
TURNING = ("all-gather", "reduce-scatter")


@dataclass(frozen=True)
class Linear:
    """A price linear in the bytes: seconds = alpha + beta * nbytes."""

    alpha: float
    beta: float

    def __call__(self, nbytes: float) -> float:
        """Return the seconds for `nbytes` bytes."""
        return self.alpha + self.beta * nbytes


def collective(machine: Machine, kind: str, axes: Iterable[Axis], turned: bool = False) -> Linear:
    """Return the price of a collective; over no axes it is zero.

    Args:
        machine: the machine.
        kind: the collective's XLA name, one of KINDS.
        axes: the axes of the machine that it is over.
        turned: whether the tensor is gathered or scattered along another dimension than its first.

    Raises:
        MachineError: the kind is not known, or an axis is not the machine's.
    """
    group = frozenset(axes)
    if unknown := group.difference(machine.axes):
        names = ", ".join(sorted(axis.name for axis in unknown))
        own = ", ".join(f"{axis.name} ({axis.size})" for axis in machine.axes)
        raise MachineError(f"{kind} over {names}: machine {machine.name!r} has no such axis; its axes: {own or 'none'}")
    joined = [part for axis in group for part in axis.extent]
    sizes = tuple(prod(units for level, units in joined if level == index) for index in range(len(machine.levels)))
    crossed = [(level, size) for level, size in zip(machine.levels, sizes, strict=True) if size > 1]
    turned = turned and kind in TURNING
    measured = crossed[0][0].curve(kind, crossed[0][1], turned) if len(crossed) == 1 else None
    if measured is not None:
        return Linear(measured.alpha, measured.beta)
    line = _over_sizes(machine.levels, kind, sizes)
    if not group:
        return line
    device = machine.device
    return Linear(line.alpha + device.launch * (1 + turned), line.beta + turned * 2 / device.bandwidth)


def collective_seconds(machine: Machine, kind: str, axes: Iterable[Axis], nbytes: float, turned: bool = False) -> float:
    """Return the seconds of one collective over `axes` with `nbytes` bytes on the full side of one device."""
    return collective(machine, kind, axes, turned)(nbytes)


@cache
def table(machine: Machine, kind: str, turned: bool = False) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return alpha and beta of `kind` over every set of axes, indexed by bit mask: bit i stands for `machine.axes[i]`.

    Returns:
        Two read-only arrays of shape [2 ** len(machine.axes)], in seconds and seconds per byte. Entry 0 is zero.
    """
    axes = machine.axes
    costs = np.array(
        [
            (cost.alpha, cost.beta)
            for mask in range(1 << len(axes))
            for cost in [collective(machine, kind, (a for i, a in enumerate(axes) if mask >> i & 1), turned)]
        ]
    )
    costs.setflags(write=False)
    return costs[:, 0], costs[:, 1]


@dataclass(frozen=True)
class _CrossedLevel:
    """A level that a group crosses.

    Attributes:
        level: the level.
        size: the number of the group's units that it joins.
        inside: the number of the group's devices in each of these units.
        outside: the number of such sets of joined units in the group: one for each unit of the levels further out.
    """

    level: Level
    size: int
    inside: int
    outside: int

    @property
    def exchanged(self) -> float:
        """The fraction of the bytes that a unit receives from the others: (size-1)/size."""
        return (self.size - 1) / self.size


@cache
def _over_sizes(levels: tuple[Level, ...], kind: str, sizes: tuple[int, ...]) -> Linear:
    """Return the price of a collective in a group that has sizes[i] units on levels[i], without launches."""
    spans = [
        _CrossedLevel(level, size, inside=prod(sizes[index + 1 :]), outside=prod(sizes[:index]))
        for index, (level, size) in enumerate(zip(levels, sizes, strict=True))
        if size > 1
    ]
    if kind not in KINDS:
        raise MachineError(f"no collective is named {kind!r}; known are {', '.join(KINDS)}")
    if not spans:
        return Linear(0.0, 0.0)
    formula = _formula(spans, kind)
    alpha, beta = spans[0].level.measured(kind)
    return Linear(alpha * formula.alpha, beta * formula.beta)


def _formula(spans: list[_CrossedLevel], kind: str) -> Linear:
    """Return the price by the formulas of the module. The levels are outermost first."""
    if kind == "collective-permute":
        return Linear(max(s.level.latency for s in spans), max(1 / s.level.bandwidth for s in spans))
    # Level by level, a device exchanges one message with each other unit on every level.
    alpha = sum((s.size - 1) * s.level.latency for s in spans)
    if kind == "all-to-all":
        return Linear(alpha, sum(s.exchanged / (s.outside * s.level.bandwidth) for s in spans))
    hierarchical = sum(s.exchanged / (s.inside * s.level.bandwidth) for s in spans)
    devices = prod(s.size for s in spans)
    flat = (devices - 1) / devices / min(s.inside * s.level.bandwidth for s in spans)
    steps = 2 if kind == "all-reduce" else 1  # an all-reduce is a reduce-scatter, then an all-gather
    return Linear(steps * alpha, steps * min(flat, hierarchical))
