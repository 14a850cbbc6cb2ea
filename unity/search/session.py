"""One search: a graph on a machine, assembled once, asked for the fastest plan, the leanest, or the whole frontier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from unity.machine.machine import Machine
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.parallelize import Assignment, parallelize
from unity.search.cost.assembly import Assembled, Listed, assemble
from unity.search.cost.cost import Training
from unity.search.cost.refinement import Measure, around, refined
from unity.search.memory.backend import backend_of
from unity.search.memory.leanest import at_once, room
from unity.search.memory.memory import predict_memory
from unity.search.solver.frontier import corners, fastest_fitting, frontier
from unity.search.solver.minimizer import Minimizer, minimize
from unity.search.solver.problem import Point
from unity.search.space.masks import Restrict, marked

POINTS, FEW = 24, 12  # vertices of a frontier's hull; of what is soon found of it
STEPS, SMALLER = 8, 0.7  # of what an operator may need at once
NEARLY = 1e-9  # what the other of time and memory counts, so that of equals the better is found
# What bytes count, of what they do on the line between the fastest plan and the leanest: for a second start of the fastest, which
# looking around one point alone may not reach; and for plans of almost the least sum, whose working sets may be much smaller.
BALANCED, LEAN = 0.1, (1.0, 8.0)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy, with its predicted seconds and bytes per device, working sets included."""

    time: float
    memory: float
    assignment: Assignment


@dataclass(frozen=True, eq=False)
class Search:
    """Answers are computed when they are asked for, and kept."""

    graph: PCG
    differentiated: frozenset[int]
    machine: Machine
    training: Training
    say: Callable[[str], None] = lambda stage: None
    listed: Listed = field(default_factory=Listed)  # shared by searches on one machine, for the same training
    restrict: Restrict = marked  # what users constrain
    guessed: float | None = None  # the rate, about, where a search of nearly the same program knows it: finding it takes long

    @cached_property
    def assembled(self) -> Assembled:
        """The graph's variables and costs."""
        self.say(f"{len(self.graph)} operators on {self.machine.devices} devices: listing parallelizations")
        kinds = self.graph, self.differentiated, self.machine, self.training
        return assemble(*kinds, listed=self.listed, restrict=self.restrict, rerun=True)

    @cached_property
    def minimizer(self) -> Minimizer:
        """The assembled problem, ready to be minimized."""
        problem = self.assembled.problem
        self.say(f"{len(problem.sizes)} choices of up to {max(problem.sizes)} values each: eliminating")
        return Minimizer(problem)

    def candidate(self, assembled: Assembled, point: Point) -> Candidate:
        """A point as a strategy. What it holds for a moment is no sum, so only here it is known."""
        assignment = assembled.assignment(point)
        graph = parallelize(self.graph, assignment)
        found = predict_memory(graph, self.differentiated, self.training, backend_of(self.machine))
        return Candidate(point.time, found.total, assignment)

    def best(self, weight: float, measure: Measure) -> tuple[Assembled, Point]:
        """What a first search finds, and a second one around it: a point, and the problem that it is one of."""
        (point,) = self.minimizer.at([weight])
        self.say("looking around what was found")
        rate = 0.0 if weight or self.assembled.whole else self.rate if self.guessed is None else self.guessed
        more = self.minimizer.at([BALANCED * rate]) if rate else []
        nearly = self.ends[1 if weight else 0]
        return refined(self.assembled, point, lambda near: minimize(near.problem, [nearly])[0], measure, more)

    @cached_property
    def ends(self) -> tuple[float, float]:
        """What bytes count where only time is wanted, or only memory: almost nothing, and almost everything."""
        (point,) = self.minimizer.at([0.0])
        ratio = point.time / point.memory if point.memory else 1.0
        return ratio * NEARLY, ratio / NEARLY

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """What bytes count, from nothing to everything."""
        return (self.ends[0], *(part * self.rate for part in (BALANCED, *LEAN)), self.ends[1])

    @cached_property
    def rate(self) -> float:
        """Seconds per byte between the fastest and the leanest that a first search finds."""
        fast, lean = self.minimizer.at([0.0, math.inf])
        return (lean.time - fast.time) / (fast.memory - lean.memory) if fast.memory > lean.memory else 0.0

    @cached_property
    def fastest(self) -> Candidate:
        """The least predicted time, whatever the memory."""
        return self.candidate(*self.fastest_point)

    @cached_property
    def fastest_point(self) -> tuple[Assembled, Point]:
        """The least time, and the problem that it is a point of."""
        return self.best(0.0, lambda p: p.time)

    @cached_property
    def leanest(self) -> Candidate:
        """The least predicted memory."""
        found = [self.leanest_point]
        found += [(self.assembled, point) for point in self.minimizer.at([part * self.rate for part in LEAN])]
        wide, minimizer = self.wide
        found += [] if wide.whole else [(wide, point) for point in minimizer.at(self.weights)[2:]]
        found += [(near, point) for near, minimizer in self.narrow for point in minimizer.at([self.ends[1]])]
        return self.leaner(found)

    def leaner(self, found: Sequence[tuple[Assembled, Point]]) -> Candidate:
        """The leanest of some points, each of a problem; or what keeps less, with no more at any operator's turn than is held now
        at the worst: as often as that is less in all."""
        best, assembled, point = self.least(found)
        for _ in range(STEPS):
            limits, before = room(assembled, point), best.memory
            nearby = [] if assembled.whole else [around(assembled, [(assembled, point)])]
            problems = [problem.without(limits) for problem in (self.assembled, *nearby)]
            leaner = [(near, p) for near in problems for p in Minimizer(near.problem).at([self.ends[1]])]
            best, assembled, point = self.least([(assembled, point), *leaner])
            if best.memory >= before:
                break
        return best

    def least(self, found: Sequence[tuple[Assembled, Point]]) -> tuple[Candidate, Assembled, Point]:
        """The strategy with the least memory, of equal ones the fastest; and the point that it is."""
        made = [(self.candidate(assembled, point), assembled, point) for assembled, point in found]
        return min(made, key=lambda one: (one[0].memory, one[0].time))

    @cached_property
    def narrow(self) -> tuple[tuple[Assembled, Minimizer], ...]:
        """The problem where no operator may need much at once: less and less, as long as there are strategies.

        What an operator has for a moment is no sum, so minimizing sums does not see it; here it is limited instead.
        """
        self.say("looking for what needs less at once")
        (point,) = self.minimizer.at([math.inf])
        most = max(at_once(self.assembled, point))
        found, part = list[tuple[Assembled, Minimizer]](), SMALLER
        for _ in range(STEPS):
            near = self.assembled.without([most * part] * len(self.assembled.costs))
            minimizer = Minimizer(near.problem)
            if minimizer.domains.empty:  # the next step is smaller
                part = math.sqrt(part)
            else:
                found.append((near, minimizer))
                most *= part
        return tuple(found)

    @cached_property
    def leanest_point(self) -> tuple[Assembled, Point]:
        """The least memory, and the problem that it is a point of."""
        return self.best(math.inf, lambda p: p.memory)

    @cached_property
    def wide(self) -> tuple[Assembled, Minimizer]:
        """The problem around the fastest, the leanest and points between them, for all limits on memory."""
        if self.assembled.whole:
            return self.assembled, self.minimizer
        between = self.minimizer.at(self.weights[1:-1])
        found = [self.fastest_point, self.leanest_point, *((self.assembled, point) for point in between)]
        near = around(self.assembled, found)
        return near, Minimizer(near.problem)

    def under(self, memory: float) -> Candidate | None:
        """The fastest found that fits into so many bytes per device, working sets included; None if the leanest does not.

        Where it is looked for depends on nothing but what fits (see `fastest_fitting`), so more memory never gives a slower one.
        """
        if self.fastest.memory <= memory:
            return self.fastest
        self.say("the fastest does not fit: searching for what does")
        if self.leanest.memory > memory:
            return None
        found = [self.leanest, *self.fitting(*self.wide, memory, self.leanest.time)]
        for assembled, minimizer in self.narrow:
            below = min(c.time for c in found)
            fastest = minimizer.at(self.weights[:1])
            if fastest and fastest[0].exact and fastest[0].time > below * (1 + 2 * NEARLY):
                break  # those after it leave even fewer strategies
            found += self.fitting(assembled, minimizer, memory, below)
        return min(found, key=lambda c: (c.time, c.memory))

    def fitting(self, assembled: Assembled, minimizer: Minimizer, memory: float, below: float) -> list[Candidate]:
        """The fastest of one problem that fits, if there is one."""
        made: dict[Point, Candidate] = {}
        least = self.fastest.time * (1 - 2 * NEARLY)  # what is faster would be missed where there is more room

        def fits(point: Point) -> bool:
            if point.time < least:
                return False
            if point not in made:
                made[point] = self.candidate(assembled, point)
            return made[point].memory <= memory

        point = fastest_fitting(minimizer, self.weights, fits, below)
        return [made[point]] if point else []

    @cached_property
    def frontier(self) -> tuple[tuple[Candidate, ...], bool]:
        """All points that no other beats, fastest first, and whether that is all there are (or the convex hull and more)."""
        self.say("searching the frontier")
        first = frontier(self.assembled.problem, points=POINTS, minimizer=self.minimizer)
        found = [self.candidate(self.assembled, p) for p in first.points]
        if not self.assembled.whole:
            self.say("looking around what was found")
            near = around(self.assembled, [(self.assembled, p) for p in first.points])
            found.append(self.fastest)
            found += [self.candidate(near, p) for p in frontier(near.problem, points=POINTS).points]
        found.append(self.leanest)
        return unbeaten(found), first.exact and self.assembled.whole

    @property
    def soon(self) -> tuple[tuple[Candidate, ...], bool, bool]:
        """The frontier, if it is known, else some points of it; whether they are all there are, and whether they are `frontier`."""
        return (*self.frontier, True) if "frontier" in vars(self) else (self.corners, False, False)

    @cached_property
    def corners(self) -> tuple[Candidate, ...]:
        """Some points of the frontier: corners of the hull that a first search sees, without what is around and between them."""
        self.say("looking for some points of the frontier")
        return unbeaten([self.candidate(self.assembled, p) for p in corners(self.minimizer, FEW)])


def unbeaten(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in both, fastest first."""
    kept: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.time, c.memory)):
        if not kept or c.memory < kept[-1].memory:
            kept.append(c)
    return tuple(kept)
