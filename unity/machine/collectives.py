"""Prices of collectives on a machine: alpha + beta * bytes, for any set of mesh axes.

**Bytes** are those of the full side on one device: all-reduce, the buffer; all-gather, the gathered output;
reduce-scatter, the input; all-to-all, the local buffer; collective-permute, the buffer sent.

**One level**, k devices, B bytes/s per device, L seconds per message: ring algorithms.

    all-gather, reduce-scatter    (k-1) L + (k-1)/k n/B
    all-reduce                    both, one after the other: twice that
    all-to-all                    (k-1) L + (k-1)/k n/B
    collective-permute            L + n/B

**Shared cards.** `Level.bandwidth` is a device's share when every device of the machine uses the level at once. In one
SPMD program that is what happens: a collective over the nodes' axes runs at the same time in as many groups as there
are devices in a node that are not in one group together. So a group with m members in each node owns m shares of the
node's cards, and no more, even if the other groups should be idle. It follows that a bigger group can be cheaper: an
all-reduce of n bytes over the nodes alone sends n through one share, over the nodes and all devices of a node it sends
n through all shares.

**Several levels**, k_i of the group's devices joined on level i (B_i, L_i), m_i = the product of the k_j further
inside:

- *flat*: one ring over all k devices. On level i all of the ring's bytes leave a unit through its m_i shares, and the
  slowest level holds up the rest: an all-gather has beta (k-1)/k / min_i(m_i B_i).
- *hierarchical*: an all-gather goes through the levels one after the other from the outside in, a reduce-scatter from
  the inside out, and on level i there are n/m_i of the bytes: beta is the sum over i of (k_i - 1)/k_i / (m_i B_i).

The smaller beta is taken. Alpha is the hierarchical one's, the sum over i of (k_i - 1) L_i, the smaller of the two
whichever has the smaller beta: libraries choose by size, so few bytes go the way of few messages and many bytes the way
of most bandwidth. The line is exact at both ends, and too low (less than twofold) around the size where the choice
changes.

A measured level has one line for each kind of collective and size of group (`Level.curves`), drawn through what they took
while all groups of that size communicated at once; a group on that level alone costs that. Where groups of that size were not
measured, or several levels are crossed, the level that goes furthest out says by how much each kind differs from the formulas
(`Level.relative`): on virtual CPU devices, say, one all-reduce is faster than a reduce-scatter and an all-gather.

Every collective is also launched: the device's `launch` is added to alpha (a measured line has it already). Of two ways that
take as long on the wire, an all-reduce or a reduce-scatter and a later all-gather, the one with fewer collectives is the faster.

The all-reduces of arguments' gradients wait for nothing and nothing waits for them, so XLA merges them, on CPUs all of a group's
devices, on GPUs up to tens of megabytes: they cost their bytes, and alpha, which all of them share, is left out
(`traffic.Collective.merged`, `reshard.Changes.merged`).

**Turned.** A tensor that is gathered or scattered along another dimension than its first lies elsewhere afterwards: on
the way it is read and written once more, by one more kernel. (An all-to-all always does so.)

All-to-all likewise: each byte crosses the level where its sender and its receiver part and no other, so beta is the sum
over i of (k_i - 1)/k_i / (k_1 ... k_(i-1) B_i), and going level by level takes the same alpha as above. A permute is as
slow as the slowest level among the group's.
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
    """Price a collective over some axes of a machine by the formulas of this module; nothing over no axes.

    Args:
        kind: its XLA name, one of KINDS.
        turned: whether the tensor is gathered or scattered along another dimension than its first.

    Raises:
        MachineError: the kind is not known, or an axis is not the machine's.
    """
    group = frozenset(axes)
    if strangers := group.difference(machine.axes):
        names = ", ".join(sorted(axis.name for axis in strangers))
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
    """Seconds of one collective over `axes` with `nbytes` bytes on the full side of one device."""
    return collective(machine, kind, axes, turned)(nbytes)


@cache
def table(machine: Machine, kind: str, turned: bool = False) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Alpha and beta of `kind` over every set of axes, indexed by bit mask: bit i stands for `machine.axes[i]`.

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
class _Span:
    """A level that a group spans: it joins `size` of the group's units, each with `inside` of its devices; there are
    `outside` such levels in the group."""

    level: Level
    size: int
    inside: int
    outside: int

    @property
    def exchanged(self) -> float:
        """The part of the bytes on this level that a unit does not hold itself: (size-1)/size."""
        return (self.size - 1) / self.size


@cache
def _over_sizes(levels: tuple[Level, ...], kind: str, sizes: tuple[int, ...]) -> Linear:
    """The cost for a group that has sizes[i] units on levels[i]."""
    spans = [
        _Span(level, size, inside=prod(sizes[index + 1 :]), outside=prod(sizes[:index]))
        for index, (level, size) in enumerate(zip(levels, sizes, strict=True))
        if size > 1
    ]
    if kind not in KINDS:
        raise MachineError(f"no collective is named {kind!r}; known are {', '.join(KINDS)}")
    if not spans:
        return Linear(0.0, 0.0)
    formula = _formula(spans, kind)
    # what was measured is of a whole level; where several are crossed, the one that goes furthest out says it
    alpha, beta = spans[0].level.measured(kind)
    return Linear(alpha * formula.alpha, beta * formula.beta)


def _formula(spans: list[_Span], kind: str) -> Linear:
    if kind == "collective-permute":
        return Linear(max(s.level.latency for s in spans), max(1 / s.level.bandwidth for s in spans))
    # Going level by level, a device exchanges one message with each other unit of its own on every level.
    alpha = sum((s.size - 1) * s.level.latency for s in spans)
    if kind == "all-to-all":
        return Linear(alpha, sum(s.exchanged / (s.outside * s.level.bandwidth) for s in spans))
    hierarchical = sum(s.exchanged / (s.inside * s.level.bandwidth) for s in spans)
    devices = prod(s.size for s in spans)
    flat = (devices - 1) / devices / min(s.inside * s.level.bandwidth for s in spans)
    steps = 2 if kind == "all-reduce" else 1  # an all-reduce is a reduce-scatter, then an all-gather
    return Linear(steps * alpha, steps * min(flat, hierarchical))
