"""Balanced cuts of a chain into stages: the slowest stage takes the least time, the messages between stages included.

Cuts are between operators. One wide cut makes all messages wide, because every stage sends a buffer of the same shape. So the best
cuts are found for several bounds on the width, and the best of these is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod

import numpy as np

from unity.base.documents import Natural, Record
from unity.machine.collectives import collective
from unity.machine.machine import Machine
from unity.pcg.capture.clustering import clusters
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.dead_code import extract
from unity.pcg.ir.program import Body
from unity.pcg.parallel.stages import Mixed, Schedule
from unity.pcg.types.axis import Axis
from unity.search.cost.operator_seconds import seconds, single_piece
from unity.transforms.pipelining.unlike.chain import SampleChain

WIDTHS = 12  # bounds on the width that are tried
SENT = 6  # messages of a tick, forward and backward (`unity.pcg.parallel.stages.sends`)


class Cuts(Record):
    """Places of a chain between stages, and the slowest stage's share of the time of all stages."""

    places: tuple[Natural, ...]
    weight: float


@dataclass(frozen=True, eq=False)
class Loads:
    """Times of a chain's operators on one device of a machine."""

    chain: SampleChain
    machine: Machine
    training: bool

    @cached_property
    def _operators(self) -> tuple[list[float], set[int]]:
        """For each place, the seconds of the operator that ends there; and the places inside of operators."""
        chain = self.chain
        place_after = {id(e): k + 1 for k, e in enumerate(chain.equations)}
        body, _ = extract(chain.body, chain.members, chain.results, chain.copied)
        loads, within = [0.0] * (len(chain) + 1), set[int]()
        constant = constants(body)
        for cluster in clusters(body, constant):
            places = [place_after[id(e)] for e in map(body.equations.__getitem__, cluster.members) if id(e) in place_after]
            if places:
                part, _ = extract(body, cluster.members, cluster.outputs, constant)
                loads[max(places)] += self.seconds(part)
                within.update(range(min(places), max(places)))
        return loads, within

    def seconds(self, body: Body) -> float:
        """Return the seconds of one operator, forward and backward."""
        tensors = [*(body.tensors[v] for v in body.inputs), *(body.tensor(a) for a in body.outputs)]
        shapes = [t.shape for t in tensors]
        flows = [self.training and body.tensors[v].floating for v in body.inputs]
        whole = single_piece(body, shapes, 1.0, flows)
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
        """Return the bytes of all samples that cross a place."""
        return sum(self.chain.body.tensors[v].nbytes for v in self.chain.crossing(place))


def estimated(loads: Loads, along: Sequence[Axis], micro_batches: int) -> tuple[float, Cuts]:
    """Return the seconds of a pipeline along these axes, if the devices of a stage share its work evenly, and its cuts.

    Raises Mixed if there are fewer operators with work than stages.
    """
    chain, stages = loads.chain, prod(axis.size for axis in along)
    if chain.heavy < stages:
        raise Mixed(f"{stages} stages cannot share {chain.heavy} products and convolutions that work on each sample: {chain.end}")
    schedule = Schedule(stages, micro_batches, stages)
    send = collective(loads.machine, "collective-permute", along)
    total, shared = float(loads.until[-1]), loads.machine.devices / stages  # devices of one stage share its work evenly
    ends = max(loads.width(0), loads.width(len(chain)))
    widths = {p: loads.width(p) for p in loads.between}
    best: tuple[float, Cuts] = (inf, Cuts((), 1.0))
    for most in _some(sorted({max(ends, w) for w in widths.values()})):
        choice = cut(loads.until, [p for p, w in widths.items() if w <= most], stages)
        if choice is not None:
            places, slowest = choice
            compute = schedule.ticks / micro_batches * slowest / shared
            time = compute + SENT * schedule.ticks * send(most / micro_batches / shared)
            best = min(best, (time, Cuts(places, slowest / total if total else 1 / stages)), key=lambda b: b[0])
    if best[0] == inf:
        raise Mixed(f"{stages} stages cannot share {len(loads.between) + 1} operators that work on each sample: {chain.end}")
    return best


def _some(values: list[float]) -> list[float]:
    """Return at most `WIDTHS` of the values, the largest among them."""
    return [values[round(k)] for k in np.linspace(0, len(values) - 1, min(WIDTHS, len(values)))]


def cut(until: np.ndarray, places: Sequence[int], stages: int) -> tuple[tuple[int, ...], float] | None:
    """Return the places that cut a chain into `stages` parts whose longest is shortest, and the seconds of that part.

    A dynamic program over the last place of the first k parts.

    Args:
        until: the seconds of all operators up to each place.
        places: the places that may be cut.
        stages: the number of parts.

    Returns:
        None if there are too few places.
    """
    if len(places) < stages - 1:
        return None
    ends = np.array([0, *places, len(until) - 1])
    seconds = until[ends]
    longest, begins = seconds - seconds[0], []  # the longest part up to each end, and where the last part begins
    longest[0] = inf
    for _ in range(stages - 1):
        longer = np.maximum(longest[:, None], seconds[None, :] - seconds[:, None])  # by the last part's begin and end
        longer[np.tril_indices(len(ends))] = inf  # a part ends after it begins
        begins.append(longer.argmin(0))
        longest = longer.min(0)
    at, cuts = len(ends) - 1, []
    for begin in reversed(begins):
        at = int(begin[at])
        cuts.append(int(ends[at]))
    return tuple(reversed(cuts)), float(longest[-1])
