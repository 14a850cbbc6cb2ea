"""Where a chain is cut into stages: so that the slowest takes the least time, with what stages send counted.

Stages are cut between operators, never inside one. A wide cut makes all that is sent wide, as every stage sends the same buffer; so
for several widths the best cuts among those that are no wider are found, and the best of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod

import numpy as np

from unity.machine.collectives import collective
from unity.machine.machine import Machine
from unity.pcg.capture.clustering import clusters
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.dead_code import extract
from unity.pcg.ir.program import Body
from unity.pcg.parallel.stages import Mixed, Schedule
from unity.pcg.types.axis import Axis
from unity.search.cost.cost import Pieces, seconds
from unity.transforms.pipelining.chain import Chain

WIDTHS = 12  # that are tried
SENT = 6  # messages of a tick, forward and backward (`unity.pcg.parallel.stages.sends`)


@dataclass(frozen=True)
class Cuts:
    """Places of a chain between stages; and what part of the time of all stages together the slowest takes."""

    places: tuple[int, ...]
    weight: float


@dataclass(frozen=True, eq=False)
class Loads:
    """What a chain's operators take on one device of a machine."""

    chain: Chain
    machine: Machine
    training: bool

    @cached_property
    def _operators(self) -> tuple[list[float], set[int]]:
        """Seconds by place, each operator's where it ends; and the places inside of operators."""
        chain = self.chain
        place = {id(e): k + 1 for k, e in enumerate(chain.equations)}
        body, _ = extract(chain.body, chain.members, chain.results, chain.copied)
        loads, within = [0.0] * (len(chain) + 1), set[int]()
        constant = constants(body)
        for cluster in clusters(body, constant):
            mine = [place[id(body.equations[k])] for k in cluster.members if id(body.equations[k]) in place]
            if mine:
                part, _ = extract(body, cluster.members, cluster.outputs, constant)
                loads[max(mine)] += self.seconds(part)
                within.update(range(min(mine), max(mine)))
        return loads, within

    def seconds(self, body: Body) -> float:
        """Of one operator, forward and backward."""
        tensors = [*(body.tensors[v] for v in body.inputs), *(body.tensor(a) for a in body.outputs)]
        shapes = [t.shape for t in tensors]
        touched, sizes = np.array([sum(t.nbytes for t in tensors)], float), np.array([[n for s in shapes for n in s]], int)
        whole = Pieces(np.ones(1), touched, sizes)
        flows = [self.training and body.tensors[v].floating for v in body.inputs]
        forward, backward, _ = seconds(body, shapes, whole, flows, self.machine)
        return float(forward[0] + backward[0])

    @cached_property
    def until(self) -> np.ndarray:
        """Seconds of all operators up to each place."""
        return np.cumsum(self._operators[0])

    @cached_property
    def between(self) -> list[int]:
        """The places between operators."""
        return [p for p in range(1, len(self.chain)) if p not in self._operators[1]]

    def width(self, place: int) -> float:
        """Bytes that cross a place, of all samples."""
        return sum(self.chain.body.tensors[v].nbytes for v in self.chain.crossing(place))


def estimated(loads: Loads, along: Sequence[Axis], micro_batches: int) -> tuple[float, Cuts]:
    """The cuts for stages along these axes, and the seconds that the stages take then, if their devices share all work evenly.
    Raises Mixed if there are fewer operators with work than stages."""
    chain, stages = loads.chain, prod(axis.size for axis in along)
    if chain.heavy < stages:
        raise Mixed(f"{stages} stages cannot share {chain.heavy} products and convolutions that work on each sample: {chain.end}")
    schedule = Schedule(stages, micro_batches, stages)
    send = collective(loads.machine, "collective-permute", along)
    total, shared = float(loads.until[-1]), loads.machine.devices / stages  # what is not along stages shares all evenly
    ends = max(loads.width(0), loads.width(len(chain)))
    widths = {p: loads.width(p) for p in loads.between}
    best: tuple[float, Cuts] = (inf, Cuts((), 1.0))
    for most in _some(sorted({max(ends, w) for w in widths.values()})):
        found = cut(loads.until, [p for p, w in widths.items() if w <= most], stages)
        if found is not None:
            places, slowest = found
            compute = schedule.ticks / micro_batches * slowest / shared
            time = compute + SENT * schedule.ticks * send(most / micro_batches / shared)
            best = min(best, (time, Cuts(places, slowest / total if total else 1 / stages)), key=lambda b: b[0])
    if best[0] == inf:
        raise Mixed(f"{stages} stages cannot share {len(loads.between) + 1} operators that work on each sample: {chain.end}")
    return best


def _some(values: list[float]) -> list[float]:
    """As many of these as are tried, the largest among them."""
    return [values[round(k)] for k in np.linspace(0, len(values) - 1, min(WIDTHS, len(values)))]


def cut(until: np.ndarray, places: Sequence[int], stages: int) -> tuple[tuple[int, ...], float] | None:
    """The places among these that cut into so many parts, the largest of which is smallest; and that."""
    if len(places) < stages - 1:
        return None
    ends = np.array([0, *places, len(until) - 1])
    done = until[ends]
    most, before = done - done[0], []  # of the parts up to each end, the largest
    most[0] = inf
    for _ in range(stages - 1):
        worse = np.maximum(most[:, None], done[None, :] - done[:, None])
        worse[np.tril_indices(len(ends))] = inf  # a part ends after it begins
        before.append(worse.argmin(0))
        most = worse.min(0)
    at, found = len(ends) - 1, []
    for choice in reversed(before):
        at = int(choice[at])
        found.append(int(ends[at]))
    return tuple(reversed(found)), float(most[-1])
