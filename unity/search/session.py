"""A search of one graph on one machine: the problem, assembled once, and the fastest plan, the leanest, and the frontier."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, takewhile
from typing import TypeAlias

from unity.base.cached_method import cached_method
from unity.machine.machine import Machine
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.parallelize import Assignment, parallelize
from unity.pcg.types.parallel_type import slice_count
from unity.search.cost.assembly import Assembled, Listed, assemble
from unity.search.cost.cost import Training
from unity.search.cost.least_computing import least_computing
from unity.search.cost.least_time import least_time
from unity.search.cost.refinement import Measure, around, refined
from unity.search.memory.backend import backend_of
from unity.search.memory.lower_bound import LeastMemory, least_memory
from unity.search.memory.memory import predict_memory, undivided_state
from unity.search.memory.working_sets import working_set_bytes, working_set_limits
from unity.search.solver.frontier import corners, fastest_fitting, frontier, relaxed_time
from unity.search.solver.minimizer import Minimizer, minimize
from unity.search.solver.problem import Point
from unity.search.space.masks import Restrict, marked

POINTS, FEW = 24, 12  # vertices of the hull: of the whole frontier, and of its quick preview
STARTS = 2  # points from which local search for the least memory starts: each more makes it several percent slower
STEPS, SMALLER = 8, 0.7  # how many limits on an operator's working set are tried, and the factor between them
# The most pairs of neighbours' values for which a limit also tries the points of the frontier: its search takes a second or two.
# A GPT of 12 layers on 8 devices has twice as many; there it takes longer than all else, and the seven points that were tried were
# met without.
QUICK = 500_000
NEARLY = 1e-9  # weight of the secondary objective: it breaks ties between equals and changes nothing else
# Weights of memory, relative to the exchange rate between the fastest and the leanest point. BALANCED gives the refinement of the
# fastest a second starting point; LEAN gives points of almost the least sum, whose working sets may be much smaller.
BALANCED, LEAN = 0.1, (1.0, 8.0)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy, with its predicted seconds and bytes per device, working sets included.

    Args:
        time: The sum of the seconds of operators and collectives.
        memory: Bytes on one device.
        assignment: The types of all values.
        simulated: Seconds of the simulated step, if the strategy was chosen by them.
    """

    time: float
    memory: float
    assignment: Assignment
    simulated: float | None = None


Priced: TypeAlias = tuple[Candidate, Assembled, Point]  # a point with its strategy, and the problem it belongs to


@dataclass(frozen=True, eq=False)
class Search:
    """A search for strategies of one graph on one machine; every answer is computed on first use and cached.

    Args:
        graph: The serial graph.
        differentiated: The inputs, by number, whose gradients are wanted.
        machine: The devices.
        training: Whether there is a backward pass, and the sizes of the optimizer's state.
        say: Receives a line of progress whenever a stage begins.
        listed: Domains and costs shared by searches on one machine for the same training.
        restrict: The user's constraints.
        guessed: An estimate of `rate` from a search of nearly the same program; computing it takes long.
        thorough: Whether a limit also tries the points of the frontier where its search is quick, and not for one of many programs.
    """

    graph: PCG
    differentiated: frozenset[int]
    machine: Machine
    training: Training
    say: Callable[[str], None] = lambda stage: None
    listed: Listed = field(default_factory=Listed)
    restrict: Restrict = marked
    guessed: float | None = None
    thorough: bool = True

    @cached_property
    def least_memory(self) -> LeastMemory:
        """A lower bound on the memory of every strategy, which takes no search."""
        return least_memory(self.graph, self.differentiated, self.training, self.machine, self.restrict)

    @cached_property
    def assembled(self) -> Assembled:
        """The graph's variables and costs."""
        self.say(f"{len(self.graph)} operators on {self.machine.devices} devices: listing parallelizations")
        kinds = self.graph, self.differentiated, self.machine, self.training
        buffered = backend_of(self.machine).buffered
        return assemble(*kinds, listed=self.listed, restrict=self.restrict, rerun=True, buffered=buffered)

    @cached_property
    def minimizer(self) -> Minimizer:
        """The assembled problem, ready to be minimized."""
        problem = self.assembled.problem
        self.say(f"{len(problem.sizes)} choices of up to {max(problem.sizes)} values each: eliminating")
        return Minimizer(problem)

    def candidate(self, assembled: Assembled, point: Point) -> Candidate:
        """Return a point as a strategy with its exact memory."""
        return self.priced(point.time, assembled.assignment(point))

    def priced(self, time: float, assignment: Assignment) -> Candidate:
        """Return a strategy with its exact memory.

        The problem does not contain working sets, as they do not add up over operators; the parallel graph tells them.
        """
        graph = parallelize(self.graph, assignment)
        memory = predict_memory(graph, self.differentiated, self.training, backend_of(self.machine))
        return Candidate(time, memory.total, assignment)

    def best(self, weight: float, measure: Measure) -> tuple[Assembled, Point]:
        """Minimize time plus `weight` times memory, then refine by `measure`; return the point and the problem it belongs to."""
        (point,) = self.minimizer.at([weight])
        self.say("looking around what was found")
        rate = 0.0 if weight or self.assembled.whole else self.rate if self.guessed is None else self.guessed
        more = self.minimizer.at([BALANCED * rate]) if rate else []
        nearly = self.ends[1 if weight else 0]
        return refined(self.assembled, point, lambda near: minimize(near.problem, [nearly])[0], measure, more)

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest weight of memory in use: time first with memory as tie-break, and the reverse."""
        (point,) = self.minimizer.at([0.0])
        ratio = point.time / point.memory if point.memory else 1.0
        return ratio * NEARLY, ratio / NEARLY

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Weights of memory in seconds per byte, in increasing order."""
        return (self.ends[0], *(part * self.rate for part in (BALANCED, *LEAN)), self.ends[1])

    @cached_property
    def rate(self) -> float:
        """Seconds per byte on the line between the fastest and the leanest point of the first search."""
        fast, lean = self.minimizer.at([0.0, math.inf])
        return (lean.time - fast.time) / (fast.memory - lean.memory) if fast.memory > lean.memory else 0.0

    @cached_property
    def unrefined(self) -> tuple[Candidate, ...]:
        """The fastest strategy of the first search, which takes a small part of the time of `fastest`; empty if all are illegal."""
        return tuple(self.candidate(self.assembled, point) for point in self.minimizer.at([0.0]))

    def estimated_time(self, memory: float) -> float:
        """Estimate the seconds of `under(memory)` in a small part of the time that this takes; infinite if nothing seems to fit.

        It proves nothing, unlike `least_time`, which takes longer. It is too low where the first search has no strategy between the
        line of time and memory and the limit, and too high where refinement is faster, or where working sets are smaller than the
        smaller one of the fastest and the leanest strategy.
        """
        if self.least_memory.total > memory or not self.unrefined:
            return math.inf
        fast, lean = self.minimizer.at([0.0, math.inf])
        working = (self.unrefined[0].memory - fast.memory, self.candidate(self.assembled, lean).memory - lean.memory)
        return relaxed_time(self.minimizer, memory - min(working))

    @cached_property
    def fastest(self) -> Candidate:
        """The strategy with the least predicted time, whatever its memory."""
        return self.candidate(*self.fastest_point)

    @cached_property
    def fastest_point(self) -> tuple[Assembled, Point]:
        """The point with the least time, and the problem it belongs to."""
        return self.best(0.0, lambda p: p.time)

    @cached_property
    def leanest(self) -> Candidate:
        """The strategy with the least predicted memory: the last point of the frontier if limits try it, too."""
        return self.frontier[0][-1] if self.tries_frontier else self.nearly_leanest

    @property
    def tries_frontier(self) -> bool:
        """Whether limits, and the leanest strategy, also try the points of the frontier."""
        return self.thorough and self.assembled.problem.entries <= QUICK

    @cached_property
    def nearly_leanest(self) -> Candidate:
        """The strategy of the least memory that descents from the leanest points reach, without a search of the frontier."""
        points = [self.leanest_point]
        points += [(self.assembled, point) for point in self.minimizer.at([part * self.rate for part in LEAN])]
        wide, minimizer = self.wide
        points += [] if wide.whole else [(wide, point) for point in minimizer.at(self.weights)[2:]]
        points += [(near, point) for near, minimizer in self.narrow for point in minimizer.at([self.ends[1]])]
        return self.with_largest_state_back(self.leaner(points))

    def leaner(self, points: Sequence[tuple[Assembled, Point]]) -> Candidate:
        """Return the leanest strategy that local search reaches from the leanest points.

        Steps from another point than the leanest are continued if the first of them leads below what was reached.
        """
        starts = {entry[0].memory: entry for entry in reversed(self.by_memory(points))}
        best, *others = [starts[memory] for memory in sorted(starts)[:STARTS]]
        best = self.descent(best)
        for start in others:
            if (leaner := self.step(start))[0].memory < best[0].memory:
                best = self.descent(leaner)
        return best[0]

    def descent(self, start: Priced) -> Priced:
        """Repeat steps from a strategy as long as they reduce its memory."""
        for _ in range(STEPS):
            leaner = self.step(start)
            if leaner[0].memory >= start[0].memory:
                return start
            start = leaner
        return start

    def step(self, start: Priced) -> Priced:
        """Minimize the residuals under the condition that no operator's turn needs more than the peak of a strategy."""
        _, assembled, point = start
        limits = working_set_limits(assembled, point)
        nearby = [] if assembled.whole else [around(assembled, [(assembled, point)])]
        problems = [problem.limited(limits) for problem in (self.assembled, *nearby)]
        leaner = [(near, p) for near in problems for p in Minimizer(near.problem).at([self.ends[1]])]
        return min([start, *self.by_memory(leaner)], key=_size)

    def by_memory(self, points: Sequence[tuple[Assembled, Point]]) -> list[Priced]:
        """Return points with their strategies, those of the least memory first, and of equal memory those of the least time."""
        return sorted(((self.candidate(assembled, point), assembled, point) for assembled, point in points), key=_size)

    @cached_property
    def narrow(self) -> tuple[tuple[Assembled, Minimizer], ...]:
        """Problems that limit the working set of every operator, more and more tightly, as long as strategies remain.

        The minimized sum does not contain working sets, so only a limit makes the minimizer consider them.
        """
        self.say("looking for what needs less at once")
        (point,) = self.minimizer.at([math.inf])
        most = max(working_set_bytes(self.assembled, point))
        problems, part = list[tuple[Assembled, Minimizer]](), SMALLER
        for _ in range(STEPS):
            near = self.assembled.limited([most * part] * len(self.assembled.costs))
            minimizer = Minimizer(near.problem)
            if minimizer.domains.empty:  # too tight: try a smaller step
                part = math.sqrt(part)
            else:
                problems.append((near, minimizer))
                most *= part
        return tuple(problems)

    @cached_property
    def leanest_point(self) -> tuple[Assembled, Point]:
        """The point with the least memory, and the problem it belongs to."""
        return self.best(math.inf, lambda p: p.memory)

    @cached_property
    def wide(self) -> tuple[Assembled, Minimizer]:
        """The problem refined around the fastest, the leanest and some points between them; it serves every memory limit."""
        if self.assembled.whole:
            return self.assembled, self.minimizer
        between = self.minimizer.at(self.weights[1:-1])
        points = [self.fastest_point, self.leanest_point, *((self.assembled, point) for point in between)]
        near = around(self.assembled, points)
        return near, Minimizer(near.problem)

    def under(self, memory: float) -> Candidate | None:
        """Return the fastest strategy whose peak is at most `memory` bytes per device; None if the leanest exceeds it.

        The points that are examined do not depend on the limit beyond which of them fit (see `fastest_fitting`), so a larger limit
        never gives a slower strategy.
        """
        if self.least_memory.total > memory:
            return None
        if self.fastest.memory <= memory:
            return self.fastest
        self.say("the fastest does not fit: searching for what does")
        if not self.has_fitting(memory):
            return None
        lean = self.nearly_leanest if self.nearly_leanest.memory <= memory else self.leanest
        candidates = [lean, *self.fitting(*self.wide, memory, lean.time)]
        if self.tries_frontier:
            candidates += self.fitting_of_frontier(memory, min(c.time for c in candidates))
        for assembled, minimizer in self.narrow:
            below = min(c.time for c in candidates)
            fastest = minimizer.at(self.weights[:1])
            if fastest and fastest[0].exact and fastest[0].time > below * (1 + 2 * NEARLY):
                break  # the following problems leave even fewer strategies
            candidates += self.fitting(assembled, minimizer, memory, below)
        return min((self.with_state_back(c, memory) for c in candidates), key=lambda c: (c.time, c.memory))

    def has_fitting(self, memory: float) -> bool:
        """Return whether any strategy has been found, or can be, whose peak is at most `memory` bytes per device.

        The frontier is searched only if a descent does not reach that little.
        """
        if self.least_memory.total > memory:
            return False
        return self.nearly_leanest.memory <= memory or self.leanest.memory <= memory

    def fitting_of_frontier(self, memory: float, below: float) -> list[Candidate]:
        """Return the fastest fitting point of the frontier that takes less than `below` seconds, as a list of one or none.

        Working sets make the exact memory of points that are sorted by time go up and down. So each is tried, and not only those
        that a bisection asks of.
        """
        faster = takewhile(lambda p: p[1].time < below, self.frontier_points[0])
        candidates = (self.of_frontier(k) for k, _ in enumerate(faster))
        return [*islice((c for c in candidates if c.memory <= memory), 1)]

    def with_state_back(self, candidate: Candidate, memory: float) -> Candidate:
        """Return a strategy with less of the optimizer's state on the host, as far as a limit allows.

        The hull has only some points between all of this state on the host and all on the device, since a byte takes about the same
        time whatever weight it belongs to. Small weights are the first to return, because latency makes their bytes expensive.
        Each needs more memory, but the last may need less: the update then has no state twice on the device.
        """
        seconds = self.state_seconds(candidate.assignment)
        if seconds and (fewer := self.returned(candidate, seconds)).memory <= memory:
            return fewer
        fits, exceeds, best = 0, len(seconds), candidate
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            fewer = self.returned(candidate, dict(islice(seconds.items(), middle)))
            if fewer.memory <= memory:
                fits, best = middle, fewer
            else:
                exceeds = middle
        return best

    def with_largest_state_back(self, candidate: Candidate) -> Candidate:
        """Return a strategy with the state of the largest weights on the device, as long as that does not need more memory.

        The update has the state of a weight twice on the device if it comes from the host.
        """
        for node, seconds in reversed(self.state_seconds(candidate.assignment).items()):
            fewer = self.returned(candidate, {node: seconds})
            if fewer.memory > candidate.memory:
                break
            candidate = fewer
        return candidate

    def state_seconds(self, assignment: Assignment) -> dict[int, float]:
        """Return the seconds of moving the state of each weight that a strategy has on the host, by id(node), the least first."""
        state, seconds = self.training.state, dict[int, float]()
        for node in self.graph.inputs:
            if id(node) in assignment.hosted and self.machine.host is not None:
                nbytes = state.of(node) * node.tensors[0].nbytes / slice_count(assignment.results[id(node)][0], assignment.axes)
                seconds[id(node)] = self.machine.host.there_and_back(nbytes)
        return dict(sorted(seconds.items(), key=lambda item: item[1]))

    def returned(self, candidate: Candidate, seconds: Mapping[int, float]) -> Candidate:
        """Return a strategy with the state of some weights on the device, with the seconds that moving it would take."""
        hosted = candidate.assignment.hosted - seconds.keys()
        return self.priced(candidate.time - sum(seconds.values()), replace(candidate.assignment, hosted=hosted))

    def fitting(self, assembled: Assembled, minimizer: Minimizer, memory: float, below: float) -> list[Candidate]:
        """Return the fastest strategy of one problem that fits and takes less than `below` seconds, as a list of one or none."""
        candidates: dict[Point, Candidate] = {}
        least = self.fastest.time * (1 - 2 * NEARLY)  # a faster point would be missed under a larger limit

        def fits(point: Point) -> bool:
            if point.time < least:
                return False
            if point not in candidates:
                candidates[point] = self.candidate(assembled, point)
            return candidates[point].memory <= memory

        point = fastest_fitting(minimizer, self.weights, fits, below)
        return [candidates[point]] if point else []

    @property
    def counted(self) -> frozenset[int]:
        """The inputs whose gradients a step computes."""
        return self.differentiated if self.training.backward else frozenset()

    @property
    def least_operator_seconds(self) -> float:
        """A quick lower bound on the seconds of any strategy: the sum over all operators, each with its best choice."""
        return sum(float(c.time.min()) for c in self.assembled.unary)

    def least_time(self, known: float, memory: float) -> float | None:
        """Return a proved lower bound on the seconds of every strategy that needs at most `memory` bytes on a device.

        It covers the values that the search leaves out, so it may take as long as `under`. `estimated_time` is a quick estimate.

        Args:
            known: The seconds of some strategy, which the bound does not exceed.
            memory: Bytes on one device; infinite without a limit.

        Returns:
            The bound; None on machines with too many axes to consider every value.
        """
        self.say("bounding every strategy")
        undivided = undivided_state(self.graph, self.counted, self.training)
        return least_time(self.assembled, known, memory - sum(h.nbytes for h in undivided))

    @cached_property
    def least_computing(self) -> float | None:
        """Seconds that no simulated step of any strategy goes below; None where operators have too many values."""
        return least_computing(self.assembled)

    @cached_property
    def frontier(self) -> tuple[tuple[Candidate, ...], bool]:
        """The Pareto frontier, fastest first, and whether it is complete (else it is the convex hull and more)."""
        points, exact = self.frontier_points
        candidates = [self.of_frontier(k) for k in range(len(points))]
        candidates += [self.nearly_leanest] if self.assembled.whole else [self.fastest, self.nearly_leanest]
        *_, leanest = unbeaten(candidates)
        return unbeaten([*candidates, self.with_largest_state_back(leanest)]), exact

    @cached_property
    def frontier_points(self) -> tuple[tuple[tuple[Assembled, Point], ...], bool]:
        """The points of the frontier by the sums that the problem counts, fastest first, and whether these are all."""
        self.say("searching the frontier")
        first = frontier(self.assembled.problem, points=POINTS, minimizer=self.minimizer)
        points = [(self.assembled, p) for p in first.points]
        if not self.assembled.whole:
            self.say("looking around what was found")
            near = around(self.assembled, points)
            points += [(near, p) for p in frontier(near.problem, points=POINTS).points]
        return tuple(sorted(points, key=lambda p: p[1].time)), first.exact and self.assembled.whole

    @cached_method()
    def of_frontier(self, number: int) -> Candidate:
        """Return a point of `frontier_points` with its exact memory."""
        return self.candidate(*self.frontier_points[0][number])

    @property
    def soon(self) -> tuple[tuple[Candidate, ...], bool, bool]:
        """The frontier if it is computed already, else its corners; whether it is complete; and whether it is `frontier`."""
        return (*self.frontier, True) if "frontier" in vars(self) else (self.corners, False, False)

    @cached_property
    def corners(self) -> tuple[Candidate, ...]:
        """Some points of the frontier: corners of the hull of the first search, without refinement."""
        self.say("looking for some points of the frontier")
        return unbeaten([self.candidate(self.assembled, p) for p in corners(self.minimizer, FEW)])


def _size(priced: Priced) -> tuple[float, float]:
    """Return the memory of a strategy, and its time, by which it is preferred to others of equal memory."""
    return priced[0].memory, priced[0].time


def unbeaten(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates that no other dominates in time and memory, fastest first."""
    front: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.time, c.memory)):
        if not front or c.memory < front[-1].memory:
            front.append(c)
    return tuple(front)
