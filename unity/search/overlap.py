"""Overlap in the objective: strategies that hide communication behind computing, judged by the simulated step.

The exact search minimizes a sum of operators and collectives. On devices that do both at once, the sum prefers strategies that
communicate less over those whose communication is hidden. So the search is repeated with lower prices for communication that can
be hidden, and the strategies that it leads to are simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.exposure import Exposure
from unity.search.cost.prediction import predict
from unity.search.session import Candidate, Search
from unity.search.simulator import simulate

WAITING = 0.001  # fraction of a step: if devices wait less for communication, no other strategies are looked for
EXPOSURES = (  # of the searches for other strategies: the parts of communication that they pay for
    Exposure(gathers=0.5, gradients=0.5),
    Exposure(gathers=0.05, gradients=0.05),
    Exposure(gradients=0.5),
    Exposure(gathers=0.75, gradients=0.5, others=0.75),
)


@dataclass(frozen=True, eq=False)
class SimulatedCandidate:
    """A strategy, and the seconds of its simulated step."""

    candidate: Candidate
    seconds: float


def simulated(search: Search, candidate: Candidate) -> SimulatedCandidate:
    """Return a strategy with the seconds of its simulated step."""
    graph = parallelize(search.graph, candidate.assignment)
    step = simulate(graph, search.machine, search.counted, training=search.training)
    return SimulatedCandidate(candidate, step.makespan)


def overlapping(search: Search, best: Candidate, limit: float) -> tuple[SimulatedCandidate, ...]:
    """Return the strategy with the least sum, and others within a memory limit that may hide more communication.

    If the devices hardly wait for communication, there are no others.

    Args:
        search: the search of the program.
        best: the strategy with the least sum.
        limit: bytes on one device.
    """
    candidates = [simulated(search, best)]
    computing = predict(parallelize(search.graph, best.assignment), search.machine, search.counted).computing
    if computing >= (1 - WAITING) * candidates[0].seconds:
        return tuple(candidates)
    for exposure in EXPOSURES if any(search.assembled.weights) else EXPOSURES[-1:]:
        other = search.exposed_under(exposure, limit)
        if other is not None and all(other.assignment != c.candidate.assignment for c in candidates):
            candidates.append(simulated(search, other))
    return tuple(candidates)
