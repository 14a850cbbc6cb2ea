"""A lower bound on the memory of every strategy of a serial graph, without a search.

A type divides a value into at most as many pieces as there are devices. So one sweep over the graph, on a single device that
recomputes whatever may be recomputed, bounds all strategies:

    (arguments + optimizer slots + max(gradients, most bytes at one turn of the backward pass)) / devices

The part of the optimizer's state that every device stores is added to that. The part that may be in the memory of the host is only
counted with the gradients, as far as it is on the device during the update. Constraints may allow fewer pieces of an argument, of
its gradient and of its slots, than there are devices; these are then divided by that number. At an operator's turn, the residuals
of the operators before it are live, and so are the cotangents of its operands and results; in a remat or in the step of a loop,
also those of the graph inside. Other values may reuse the memory of later gradients, hence the maximum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from unity.machine.machine import Machine
from unity.pcg.ir.graph import BRANCHES, LOOPS, PCG, STAGES, TAIL
from unity.pcg.parallel.parallelize import on_one_device
from unity.search.cost.cost import Training
from unity.search.cost.state_sizes import StateMemory
from unity.search.memory.memory import live_ranges
from unity.search.memory.region import Region
from unity.search.space.constrained_slices import most_slices
from unity.search.space.live_buffers import GRADIENTS, KEPT, SLOTS, Buffer, stays
from unity.search.space.masks import Restrict, marked
from unity.search.space.opening import sites_of

GROUPED = (BRANCHES, STAGES, TAIL)  # a device runs only a part of these, so the values inside are not counted


@dataclass(frozen=True)
class LeastMemory:
    """Bytes that one device needs at least.

    Args:
        throughout: Arguments and optimizer slots, which are live throughout the step.
        gradients: The gradients of the weights.
        turn: The residuals and cotangents at one turn of the backward pass: the most of all turns.
        update: Slots that may be in the memory of the host, during the update: those that are on the device nevertheless, and those
            of one weight that are fetched and sent back.
        undivided: The part of `throughout` that every device stores whole, however many there are.
        undivided_gradients: The part of `gradients` that every device stores whole.
    """

    throughout: float
    gradients: float
    turn: float
    update: float = 0.0
    undivided: float = 0.0
    undivided_gradients: float = 0.0

    @property
    def state(self) -> float:
        """Bytes of arguments, gradients and optimizer slots, which no recomputation reduces."""
        return self.throughout + self.gradients + self.update

    @property
    def of_state(self) -> LeastMemory:
        """The bound without residuals and cotangents, for all programs that compute the same in another order."""
        return replace(self, turn=0.0)

    @property
    def total(self) -> float:
        """Bytes in all."""
        return self.throughout + max(self.gradients + self.update, self.turn)

    @property
    def anywhere(self) -> float:
        """Bytes in all on a machine with any number of devices."""
        return self.undivided + self.undivided_gradients

    def growth(self, limit: float) -> float:
        """Return the factor of devices that brings the bound to a limit, at least; infinite if none does."""
        if self.anywhere >= limit:
            return inf
        state = (self.state - self.anywhere) / (limit - self.anywhere)
        turn = (self.throughout + self.turn - self.undivided) / (limit - self.undivided)
        return max(state, turn)


def least_memory(
    graph: PCG,
    differentiated: Collection[int],
    training: Training,
    machine: Machine,
    restrict: Restrict = marked,
) -> LeastMemory:
    """Return the memory that no strategy of a serial graph goes below.

    Args:
        graph: The serial graph.
        differentiated: The inputs, by number, whose gradients are wanted; ignored if `training` has no backward pass.
        training: Whether there is a backward pass, and the sizes of the optimizer's state.
        machine: The devices.
        restrict: The user's constraints.
    """
    opened = sites_of(graph, differentiated, training.backward)
    operators = [site for site in opened.sites if site.kind == "operator"]
    inner = frozenset(id(site.node) for site in operators if site.recomputable)
    rerun = frozenset(id(site.node) for site in operators if site.reader is not None)
    leanest = replace(training, state=training.state.leanest)
    on_one = on_one_device(graph, inner, rerun)
    live = live_ranges(on_one, differentiated, leanest)
    constrained = most_slices(opened, machine, restrict)
    pairs = zip(graph.inputs, on_one.inputs, strict=True)
    slices = {id(copy): constrained[id(node)] for node, copy in pairs if id(node) in constrained}

    def local(h: Buffer) -> float:
        return h.nbytes / slices.get(id(h.node), machine.devices)

    state = [h for h in live.counted if h.why != GRADIENTS]
    gradients = [h for h in live.counted if h.why == GRADIENTS]
    whole = sum(h.nbytes for h in live.beside if h.why == SLOTS)
    update = _least_update([local(h) for h in live.hosted], training.state.memory is StateMemory.EITHER)
    return LeastMemory(
        whole + sum(map(local, state)),
        sum(map(local, gradients)),
        _busiest_turn(live.region) / machine.devices,
        update,
        whole + sum(h.nbytes for h in state if slices.get(id(h.node)) == 1),
        sum(h.nbytes for h in gradients if slices.get(id(h.node)) == 1),
    )


def _least_update(sizes: Sequence[float], may_stay: bool) -> float:
    """Return the bytes of weights' slots on the device during the update, at least.

    Those that are on the host are there twice, one weight at a time. If they `may_stay`, the largest are the first to do so.
    """
    ascending = sorted(sizes)
    if not may_stay:
        return 2 * max(ascending, default=0.0)
    moved, total = accumulate(ascending, initial=0.0), sum(ascending)
    return min(total - there + 2 * largest for there, largest in zip(moved, (0.0, *ascending), strict=True))


def _busiest_turn(region: Region) -> float:
    """Return the most bytes of residuals and cotangents at one turn of a graph's backward pass."""
    below = most = 0.0
    for operator in region.operators:
        node = operator.node
        if node.kind in GROUPED:
            continue
        below += sum(h.nbytes for h in operator.kept if h.why == KEPT)
        if node.kind in LOOPS or node.kind == "remat":
            turn = _busiest_turn(region.inside[id(node)])
        else:
            ends = dict.fromkeys((*node.operands, *node.results))
            turn = sum(region.residuals.own_bytes[v] for v in ends) if region.residuals.training else 0.0
        most = max(most, below + (0.0 if stays(node) else turn))
    return most
