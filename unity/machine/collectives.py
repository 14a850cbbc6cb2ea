"""Prices of collectives on a machine, over any set of mesh axes: the least of a few lines, seconds = alpha + beta * bytes.

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

Beta is the smaller of the two. Alpha, without protocols, is that of the hierarchical algorithm, the sum over i of (k_i - 1) L_i.

In an all-to-all each byte crosses only the level at which its sender and its receiver part, so beta is the sum over i of
(k_i - 1)/k_i / (k_1 ... k_(i-1) B_i); level by level, it takes the same alpha. A permute is as slow as the slowest of the levels.

**Protocols.** Libraries choose by size how they pass bytes on: with flags beside the data, so that a step is short, or in large
pieces, which reach the bandwidth. Levels with `protocols` have a line for each, and the price is the least of them (NCCL's own
model, `src/graph/tuning.cc`). With steps of s_i seconds on level i, an all-gather, a reduce-scatter and half an all-reduce take:

    ring    start + sum over i of (k_1 ... k_(i-1)) (k_i - 1) s_i, and beta as above from the protocol's shares of the B_i, but at
            least (k-1)/k over the most that the protocol reaches
    tree    an all-reduce alone: start + twice the sum over i of floor(log2 k_i) tree steps where the level has trees, else of
            (k_i - 1) s_i, and beta 2 / min_i(m_i B_i) from the trees' shares, but at least 2 over that most

A group with one device in each node waits for each of its messages, so a step of its ring takes as long as one of a tree.

**Measurements.** A measured level has a line for each kind of collective and size of group (`Level.curves`), fitted to what they
took while all groups of that size communicated at once. It is the price of a group on that level alone. For other sizes, and for
groups on several levels, the formulas are multiplied by the factors measured for each kind on the outermost of the group's levels
(`Level.relative`): on virtual CPU devices, for example, an all-reduce is faster than a reduce-scatter and an all-gather.

**Launches.** The device's `launch` is added to alpha; a measured line, and a protocol's start, include it. So of two ways that
take equally long on the wire, such as an all-reduce, or a reduce-scatter and a later all-gather, the one with fewer collectives is
faster.

**Merging.** The all-reduces of arguments' gradients, and of conversions of arguments, wait for nothing and no collective waits for
them, so XLA merges them: on CPUs all that are over the same devices, on GPUs up to 30 MiB (`most_merged`). A smaller one takes its
part, by bytes, of the seconds of a merged one of that size (`pcg.parallel.traffic.Collective.merged`,
`machine.resharding_tables.Changes.merged`).

**Turning.** A tensor that is gathered or scattered along another dimension than its first is transposed: it is read and written
once more, by one more kernel. (An all-to-all always transposes.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from unity.machine.hardware import Device, Level, MachineError, Protocol
from unity.machine.machine import CPU, Machine
from unity.pcg.types.axis import Axis

MERGED = 30 * 2**20  # bytes: the default of XLA's option `xla_gpu_all_reduce_combine_threshold_bytes`
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
TURNING = ("all-gather", "reduce-scatter")

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Linear:
    """A price linear in the bytes: seconds = alpha + beta * nbytes."""

    alpha: float
    beta: float

    def __call__(self, nbytes: float) -> float:
        """Return the seconds for `nbytes` bytes."""
        return self.alpha + self.beta * nbytes


@dataclass(frozen=True)
class Price:
    """The least of some lines, none of which lies above another one everywhere."""

    lines: tuple[Linear, ...]

    def __call__(self, nbytes: float) -> float:
        """Return the seconds for `nbytes` bytes."""
        return min(line(nbytes) for line in self.lines)

    def merged(self, nbytes: float, most: float) -> float:
        """Return the seconds for `nbytes` bytes as a part of collectives that are merged up to `most` bytes."""
        part = nbytes / max(nbytes, most) if nbytes else 0.0
        return min(part * line.alpha + line.beta * nbytes for line in self.lines)

    @property
    def alpha(self) -> float:
        """Seconds with no bytes."""
        return min(line.alpha for line in self.lines)

    @property
    def beta(self) -> float:
        """Seconds for each byte of many."""
        return min(line.beta for line in self.lines)


@dataclass(frozen=True, eq=False)
class PriceTable:
    """The prices of a kind of collective over every set of axes, by bit mask: bit i stands for `machine.axes[i]`.

    Attributes:
        alpha: seconds, [lines, 2 ** axes]; the prices with the fewest lines repeat their last one.
        beta: seconds for each byte, likewise.
    """

    alpha: Array
    beta: Array

    def seconds(self, masks: NDArray[np.integer] | int, nbytes: Array | float) -> Array:
        """Return the seconds of collectives over sets of axes. `nbytes`: the bytes on the full side of one device."""
        masks, nbytes = np.broadcast_arrays(masks, nbytes)
        return (self.alpha[:, masks] + self.beta[:, masks] * nbytes).min(0)

    def merged_seconds(self, masks: NDArray[np.integer] | int, nbytes: Array | float, most: float) -> Array:
        """Return the seconds of collectives as parts of ones that are merged up to `most` bytes (`Price.merged`)."""
        masks, nbytes = np.broadcast_arrays(masks, nbytes)
        part = nbytes / np.maximum(np.maximum(nbytes, most), 1.0)
        return (self.alpha[:, masks] * part + self.beta[:, masks] * nbytes).min(0)


def collective(machine: Machine, kind: str, axes: Iterable[Axis], turned: bool = False) -> Price:
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
    if kind not in KINDS:
        raise MachineError(f"no collective is named {kind!r}; known are {', '.join(KINDS)}")
    return _of_sizes(machine.levels, machine.device, kind, group_sizes(machine, group), turned and kind in TURNING)


def group_sizes(machine: Machine, axes: Iterable[Axis]) -> tuple[int, ...]:
    """Return how many units a group over some axes has on each level, on which alone the prices of its collectives depend."""
    extents = [part for axis in axes for part in axis.extent]
    return tuple(prod(units for level, units in extents if level == index) for index in range(len(machine.levels)))


def most_merged(machine: Machine) -> float:
    """Return the bytes up to which the compiler merges all-reduces of gradients."""
    return inf if machine.device.name == CPU else MERGED


def collective_seconds(machine: Machine, kind: str, axes: Iterable[Axis], nbytes: float, turned: bool = False) -> float:
    """Return the seconds of one collective over `axes` with `nbytes` bytes on the full side of one device."""
    return collective(machine, kind, axes, turned)(nbytes)


@cache
def table(machine: Machine, kind: str, turned: bool = False) -> PriceTable:
    """Return the prices of `kind` over every set of axes; entry 0, over none, is zero."""
    axes = machine.axes
    sets = ((a for i, a in enumerate(axes) if mask >> i & 1) for mask in range(1 << len(axes)))
    prices = [collective(machine, kind, chosen, turned).lines for chosen in sets]
    longest = max(map(len, prices))
    lines = [(*price, *(price[-1:] * (longest - len(price)))) for price in prices]
    alpha, beta = (np.array([[getattr(line, of) for line in of_mask] for of_mask in lines]).T for of in ("alpha", "beta"))
    for figures in (alpha, beta):
        figures.setflags(write=False)
    return PriceTable(alpha, beta)


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
def _of_sizes(levels: tuple[Level, ...], device: Device, kind: str, sizes: tuple[int, ...], turned: bool) -> Price:
    """Return the price of a collective in a group that has sizes[i] units on level i."""
    spans = [
        _CrossedLevel(level, size, inside=prod(sizes[index + 1 :]), outside=prod(sizes[:index]))
        for index, (level, size) in enumerate(zip(levels, sizes, strict=True))
        if size > 1
    ]
    if not spans:
        return Price((Linear(0.0, 0.0),))
    measured = spans[0].level.curve(kind, spans[0].size, turned) if len(spans) == 1 else None
    if measured is not None:
        return Price((Linear(measured.alpha, measured.beta),))
    alpha, beta = spans[0].level.measured(kind)
    lines = list[Linear]()
    for start, line in _formulas(spans, kind):
        waiting = alpha * (line.alpha + max(start - device.launch, 0.0))
        lines.append(Linear(waiting + device.launch * (1 + turned), beta * line.beta + turned * 2 / device.bandwidth))
    return Price(_undominated(lines))


def _undominated(lines: Iterable[Linear]) -> tuple[Linear, ...]:
    """Return the lines that do not lie above another one everywhere, by ascending alpha."""
    left = list[Linear]()
    for line in sorted(lines, key=lambda line: (line.alpha, line.beta)):
        if not left or line.beta < left[-1].beta:
            left.append(line)
    return tuple(left)


def _formulas(spans: list[_CrossedLevel], kind: str) -> Iterator[tuple[float, Linear]]:
    """Yield the prices by the formulas of the module, each with the protocol's seconds before the first step."""
    if kind == "collective-permute":
        yield 0.0, Linear(max(s.level.latency for s in spans), max(1 / s.level.bandwidth for s in spans))
        return
    # Level by level, a device exchanges one message with each other unit on every level.
    alpha = sum((s.size - 1) * s.level.latency for s in spans)
    if kind == "all-to-all":
        yield 0.0, Linear(alpha, sum(s.exchanged / (s.outside * s.level.bandwidth) for s in spans))
        return
    halves = 2 if kind == "all-reduce" else 1  # an all-reduce is a reduce-scatter, then an all-gather
    protocols = [{p.name: p for p in s.level.protocols} for s in spans]
    if not any(protocols):
        yield 0.0, Linear(halves * alpha, halves * _ring_beta(spans, [1.0] * len(spans)))
    for name in next(filter(None, protocols), ()):
        if not all(name in of_level for of_level in protocols if of_level):
            continue
        each = [of_level.get(name) or _of_latency(s.level) for s, of_level in zip(spans, protocols, strict=True)]
        start = max(p.start for p in each)
        yield start, Linear(halves * _ring_alpha(spans, each), halves * _protocol_ring_beta(spans, each))
        if halves == 2 and any(p.tree_step is not None for p in each):
            yield start, _tree(spans, each)


def _of_latency(level: Level) -> Protocol:
    """Return the protocol of a level that has none."""
    return Protocol("", 0.0, level.latency)


def _ring_alpha(spans: list[_CrossedLevel], protocols: list[Protocol]) -> float:
    """Return the seconds of the steps of one ring over all devices of a group."""
    exposed, least = protocols[-1].tree_step is not None, max(p.least_step for p in protocols)
    steps = (p.tree_step if exposed and p.tree_step is not None else max(p.step, least) for p in protocols)
    return sum(s.outside * (s.size - 1) * step for s, step in zip(spans, steps, strict=True))


def _ring_beta(spans: list[_CrossedLevel], shares: list[float]) -> float:
    """Return the seconds for each byte of an all-gather, flat or hierarchical, by parts of the levels' bandwidths."""
    bandwidths = [share * s.inside * s.level.bandwidth for s, share in zip(spans, shares, strict=True)]
    hierarchical = sum(s.exchanged / bandwidth for s, bandwidth in zip(spans, bandwidths, strict=True))
    devices = prod(s.size for s in spans)
    return min((devices - 1) / devices / min(bandwidths), hierarchical)


def _protocol_ring_beta(spans: list[_CrossedLevel], protocols: list[Protocol]) -> float:
    """Return the seconds for each byte of an all-gather by a protocol."""
    devices = prod(s.size for s in spans)
    most = min((p.most for p in protocols if p.most is not None), default=inf)
    return max(_ring_beta(spans, [p.share for p in protocols]), (devices - 1) / devices / most)


def _tree(spans: list[_CrossedLevel], protocols: list[Protocol]) -> Linear:
    """Return the price of an all-reduce up a tree of the outer units and down again, with chains inside of the units."""
    crossed = list(zip(spans, protocols, strict=True))
    alpha = sum((s.size - 1) * p.step if p.tree_step is None else (s.size.bit_length() - 1) * p.tree_step for s, p in crossed)
    slowest = min(p.tree_share * s.inside * s.level.bandwidth for s, p in crossed)
    return Linear(2 * alpha, 2 / min(slowest, *(p.most for p in protocols if p.most is not None), inf))
