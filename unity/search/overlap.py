"""Overlap in the objective: strategies that hide communication behind computing, judged by the simulated step.

The exact search minimizes a sum of operators and collectives. On devices that do both at once, the sum prefers strategies that
communicate less over those whose communication is hidden. So its problem is solved again with lower prices for communication that
can be hidden, and the strategies that this leads to are simulated. All problems share their domains, and the prices of operators
and of changes of type; and the simulation ends a search that leads nowhere after its first steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.assembly import Assembled
from unity.search.cost.exposure import Exposure
from unity.search.cost.prediction import predict
from unity.search.cost.refinement import around
from unity.search.session import Candidate, Search
from unity.search.simulator import simulate
from unity.search.solver.frontier import fastest_fitting
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Point

WAITING = 0.001  # fraction of a step: if devices wait less for communication, no other strategies are looked for
EXPOSURES = (  # of the searches for other strategies: the prices that they pay for communication
    Exposure(gathers=0.5, gradients=0.5),
    Exposure(gathers=0.05, gradients=0.05),
    Exposure(gathers=4.0, gradients=0.05, others=4.0),  # gradients alone keep the links busy
    Exposure(gradients=0.5),
    Exposure(gathers=0.75, gradients=0.5, others=0.75),
)
ROUNDS = 6  # refinements of a strategy, at most
GAIN = 1e-3  # relative gain of the exposed price below which no further round follows
FAR = 1.3  # times the shortest simulated step: a strategy whose step is longer is not refined
FURTHER = 2.0  # times its last gain: a strategy that is longer than the shortest step by more is not refined further


@dataclass(frozen=True, eq=False)
class SimulatedCandidate:
    """A strategy with the seconds of its simulated step.

    Args:
        candidate: The strategy.
        seconds: The length of the simulated step.
        computing: The seconds of it in which a device computes.
        summed: The seconds of all operators and collectives, one after the other.
    """

    candidate: Candidate
    seconds: float
    computing: float
    summed: float


def simulated(search: Search, candidate: Candidate) -> SimulatedCandidate:
    """Return a strategy with the seconds of its simulated step."""
    graph = parallelize(search.graph, candidate.assignment)
    prediction = predict(graph, search.machine, search.counted, search.training.state)
    step = simulate(graph, search.machine, search.counted, training=search.training, prediction=prediction)
    return SimulatedCandidate(candidate, step.makespan, prediction.computing, prediction.time)


def overlapping(search: Search, best: Candidate, limit: float) -> tuple[SimulatedCandidate, ...]:
    """Return the strategy with the least sum, and others within a memory limit that may hide more communication.

    Only the first is returned if the devices hardly wait for communication.

    Args:
        search: the search of the program.
        best: the strategy with the least sum.
        limit: bytes on one device.
    """
    first = simulated(search, best)
    candidates = [first]
    if first.computing >= (1 - WAITING) * first.seconds:
        return (first,)
    for other in _others(search, first, limit):
        if all(other.candidate.assignment != c.candidate.assignment for c in candidates):
            candidates.append(other)
    return tuple(candidates)


def _others(search: Search, first: SimulatedCandidate, limit: float) -> Iterator[SimulatedCandidate]:
    """Yield strategies that would be fast to fit if a part of communication were free, for several such parts."""
    exposures = EXPOSURES if any(search.assembled.weights) else EXPOSURES[-1:]
    if search.fastest.memory > limit:
        yield from _limited(search, exposures, limit)
    else:
        yield from _refined(search, exposures, first, limit)


def _limited(search: Search, exposures: Iterable[Exposure], limit: float) -> Iterator[SimulatedCandidate]:
    """Yield strategies near those in which the search under the limit looked for its result, the limit being met roughly.

    The one with the shortest step is looked for again, as exactly as the search does.
    """
    solutions = [_fastest(search, replace(search.wide[0], exposure=e), limit) for e in exposures]
    fitting = [s for s in solutions if s is not None]
    yield from (s.strategy for s in fitting)
    if fitting:
        best = min(fitting, key=lambda s: s.strategy.seconds)
        exact = _fastest(search, best.assembled, limit, best.minimizer, roughly=False)
        if exact is not None:
            yield exact.strategy


def _refined(
    search: Search, exposures: Sequence[Exposure], first: SimulatedCandidate, limit: float
) -> Iterator[SimulatedCandidate]:
    """Yield the strategies of the problem of all values, each with its refinements.

    Last, yield strategies near the strategy with the least sum and the one with the shortest step.
    """
    shortest, points = first.seconds, [search.fastest_point]
    begun = set[tuple[int, ...]]()
    for exposure in exposures:
        start = _fastest(search, replace(search.assembled, exposure=exposure), limit)
        if start is None or start.point.values in begun:
            continue
        begun.add(start.point.values)
        for solution in _descent(search, start, shortest, limit):
            yield solution.strategy
            if solution.strategy.seconds < shortest:
                shortest = solution.strategy.seconds
                points = [search.fastest_point, (solution.assembled, solution.point)]
    if not search.assembled.whole:
        near = around(search.assembled, points)
        for exposure in dict.fromkeys((exposures[0], exposures[-1])):
            last = _fastest(search, replace(near, exposure=exposure), limit)
            if last is not None:
                yield last.strategy


def _descent(search: Search, start: _Solution, shortest: float, limit: float) -> Iterator[_Solution]:
    """Yield a solution and its refinements, as long as the simulated step gets shorter and may become the shortest.

    Args:
        search: the search of the program.
        start: a solution of the problem of all values.
        shortest: seconds of the shortest simulated step so far.
        limit: bytes on one device.
    """
    yield start
    last, hoped = start, (FAR - 1) * shortest
    for _ in range(0 if start.assembled.whole else ROUNDS):
        if last.strategy.seconds - shortest > hoped:
            break
        better = _fastest(search, around(last.assembled, [(last.assembled, last.point)]), limit)
        if better is None or better.point.time > (1 - GAIN) * last.point.time:
            break
        yield better
        hoped = FURTHER * (last.strategy.seconds - better.strategy.seconds)
        if hoped < 0:
            break
        last, shortest = better, min(shortest, better.strategy.seconds)


@dataclass(frozen=True, eq=False)
class _Solution:
    """A point of a problem with exposed prices, and its strategy."""

    search: Search
    assembled: Assembled
    minimizer: Minimizer
    point: Point
    candidate: Candidate

    @cached_property
    def strategy(self) -> SimulatedCandidate:
        """The simulated strategy, whose `time` counts all communication."""
        strategy = simulated(self.search, self.candidate)
        return replace(strategy, candidate=replace(self.candidate, time=strategy.summed))


def _fastest(
    search: Search, assembled: Assembled, limit: float, minimizer: Minimizer | None = None, roughly: bool = True
) -> _Solution | None:
    """Return the fastest solution within a memory limit, or one nearly as fast; None if no candidate fits."""
    minimizer, candidates = minimizer or Minimizer(assembled.problem), dict[Point, Candidate]()

    def fits(point: Point) -> bool:
        if point not in candidates:
            candidates[point] = search.candidate(assembled, point)
        return candidates[point].memory <= limit

    point = next(iter(minimizer.at(search.ends[:1])), None)
    if point is not None and not fits(point):
        point = fastest_fitting(minimizer, search.weights, fits, roughly=roughly)
    return None if point is None else _Solution(search, assembled, minimizer, point, candidates[point])
