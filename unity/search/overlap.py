"""Overlap in the objective: strategies that hide communication behind computing, judged by the simulated step.

The exact search minimizes a sum of operators and collectives. On devices that do both at once, the sum prefers strategies that
communicate less over those whose communication is hidden. So the search is repeated with lower prices for what can be hidden, and
the strategies that it leads to are simulated.
"""

from __future__ import annotations

from dataclasses import replace

from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.exposure import Exposure
from unity.search.cost.prediction import predict
from unity.search.session import Candidate, Search
from unity.search.simulator import simulate

WAITING = 0.001  # the part of a step that devices must wait for communication so that strategies are looked for that hide more
# Half of the traffic of weights is hidden, nearly all of it, half of the sums of gradients, and a quarter of everything besides.
EXPOSURES = (
    Exposure(gathers=0.5, gradients=0.5),
    Exposure(gathers=0.05, gradients=0.05),
    Exposure(gradients=0.5),
    Exposure(gathers=0.75, gradients=0.5, others=0.75),
)


def simulated(search: Search, candidate: Candidate) -> Candidate:
    """Return a strategy with the seconds of its simulated step."""
    graph = parallelize(search.graph, candidate.assignment)
    step = simulate(graph, search.machine, search.counted, training=search.training)
    return replace(candidate, simulated=step.makespan)


def overlapping(search: Search, best: Candidate, limit: float) -> tuple[Candidate, ...]:
    """Return strategies within a memory limit that may hide more communication than the one with the least sum, which is first.

    All are simulated. If the devices hardly wait for communication, `best` is the only one.

    Args:
        search: the search of the program.
        best: the strategy with the least sum.
        limit: bytes on one device.
    """
    candidates = [simulated(search, best)]
    computing = predict(parallelize(search.graph, best.assignment), search.machine, search.counted).computing
    if computing >= (1 - WAITING) * seconds_of(candidates[0]):
        return tuple(candidates)
    for exposure in EXPOSURES if any(search.assembled.weights) else EXPOSURES[-1:]:
        other = search.exposed_under(exposure, limit)
        if other is not None and all(other.assignment != c.assignment for c in candidates):
            candidates.append(simulated(search, other))
    return tuple(candidates)


def seconds_of(candidate: Candidate) -> float:
    """Return the seconds of a simulated strategy."""
    assert candidate.simulated is not None
    return candidate.simulated
