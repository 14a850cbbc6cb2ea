"""One search: a graph on a machine, assembled once, asked for the fastest plan, the leanest, or the whole frontier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from unity.pcg.graph import PCG
from unity.pcg.parallelize import Assignment, parallelize
from unity.search.assemble import Assembled, assemble
from unity.search.backend import backend_of
from unity.search.cost import Training
from unity.search.domains import domains
from unity.search.frontier import frontier, frontier_under
from unity.search.machine import Machine
from unity.search.memory import predict_memory
from unity.search.minimizer import Minimizer, minimize
from unity.search.problem import Point
from unity.search.refine import Measure, around, refined

POINTS = 24  # vertices of a frontier's hull
TRIES = 6  # searches for a plan that fits with its working sets
STEPS, SMALLER = 8, 0.7  # of what an operator may need at once
# What bytes count, of what they do on the line between the fastest plan and the leanest: for a second start of the fastest, which
# looking around one point alone may not reach; and for plans of almost the least sum, whose working sets may be much smaller.
BALANCED, LEAN = 0.1, (1.0, 8.0)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy, with its predicted seconds and bytes per device, working sets included."""

    time: float
    memory: float
    assignment: Assignment


Found: TypeAlias = tuple[Candidate, Assembled, Point, float]


@dataclass(frozen=True, eq=False)
class Search:
    """Answers are computed when they are asked for, and kept."""

    graph: PCG
    differentiated: frozenset[int]
    machine: Machine
    training: Training
    say: Callable[[str], None] = lambda stage: None

    @cached_property
    def assembled(self) -> Assembled:
        """The graph's variables and costs."""
        self.say(f"{len(self.graph)} operators on {self.machine.devices} devices: listing parallelizations")
        return assemble(self.graph, self.differentiated, self.machine, self.training)

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
        more = [] if weight or self.assembled.whole else self.minimizer.at([BALANCED * self.rate])
        return refined(self.assembled, point, lambda near: minimize(near.problem, [weight])[0], measure, more)

    @cached_property
    def rate(self) -> float:
        """Seconds per byte between the fastest and the leanest that a first search finds."""
        fast, lean = self.minimizer.at([0.0, math.inf])
        return (lean.time - fast.time) / (fast.memory - lean.memory) if fast.memory > lean.memory else 0.0

    @cached_property
    def fastest(self) -> Candidate:
        """The least predicted time, whatever the memory."""
        return self.candidate(*self.best(0.0, lambda p: p.time))

    @cached_property
    def leanest(self) -> Candidate:
        """The least predicted memory."""
        found = [self.candidate(*self.leanest_point)]
        found += [self.candidate(self.assembled, point) for point in self.minimizer.at([part * self.rate for part in LEAN])]
        found += [self.candidate(near, point) for near in self.narrow for point in minimize(near.problem, [math.inf])]
        return min(found, key=lambda c: (c.memory, c.time))

    @cached_property
    def narrow(self) -> tuple[Assembled, ...]:
        """The problem where no operator may need much at once: less and less, as long as there are strategies.

        What an operator has for a moment is no sum, so minimizing sums does not see it; here it is limited instead.
        """
        self.say("looking for what needs less at once")
        (point,) = self.minimizer.at([math.inf])
        most = max(float(ends[v]) for ends, v in zip(self.assembled.ends, point.values, strict=True))
        found, part = list[Assembled](), SMALLER
        for _ in range(STEPS):
            near = self.assembled.without(most * part)
            if domains(near.problem).empty:  # the next step is smaller
                part = math.sqrt(part)
            else:
                found.append(near)
                most *= part
        return tuple(found)

    @cached_property
    def leanest_point(self) -> tuple[Assembled, Point]:
        """The least memory, and the problem that it is a point of."""
        return self.best(math.inf, lambda p: p.memory)

    def under(self, memory: float) -> Candidate | None:
        """The fastest found that fits into so many bytes per device; None if the leanest does not.

        The search leaves out what is held for a moment, and counts gradients before they are there. So it is given less room,
        or more, by as much as the last plan exceeded the limit or fell short of it.
        """
        if self.fastest.memory <= memory:
            return self.fastest
        self.say("the fastest does not fit: searching the frontier for what does")
        found = self.fitting(self.assembled, self.minimizer, memory)
        if found is not None:
            return self.faster(*found, memory)
        for near in self.narrow:
            found = self.fitting(near, Minimizer(near.problem), memory)
            if found is not None:
                return found[0]
        return self.leanest if self.leanest.memory <= memory else None

    def fitting(self, assembled: Assembled, minimizer: Minimizer, memory: float) -> Found | None:
        """The fastest plan that a first search finds for so much memory, its point, and the room that this was given."""
        room, best = memory, None
        for _ in range(TRIES):
            # between the points of the hull a second search looks, if there is one
            point = frontier_under(assembled.problem, room, minimizer, hull=not assembled.whole)
            if point is None:
                break
            found = self.candidate(assembled, point)
            if best is not None and (found.memory > memory or found.time >= best[0].time):
                break
            best = (found, assembled, point, room) if found.memory <= memory else best
            room = point.memory + memory - found.memory
        return best

    def faster(self, found: Candidate, assembled: Assembled, point: Point, room: float, memory: float) -> Candidate:
        """What a second search around a point finds, if it fits too."""
        for _ in range(0 if assembled.whole else TRIES):
            near, best = self.refined_within(assembled, point, room)
            other = self.candidate(near, best)
            if other.memory <= memory:
                return other if other.time < found.time else found
            room = best.memory - (other.memory - memory)
        return found

    def refined_within(self, assembled: Assembled, point: Point, room: float) -> tuple[Assembled, Point]:
        """A second search around a point, for the fastest in so much memory."""
        return refined(
            assembled,
            point,
            lambda near: frontier_under(near.problem, room),
            lambda p: p.time if p.memory <= room else math.inf,
        )

    @cached_property
    def frontier(self) -> tuple[tuple[Candidate, ...], bool]:
        """All points that no other beats, fastest first, and whether that is all there are (or the convex hull and more)."""
        self.say("searching the frontier")
        first = frontier(self.assembled.problem, points=POINTS, minimizer=self.minimizer)
        found = [self.candidate(self.assembled, p) for p in first.points]
        if not self.assembled.whole:
            self.say("looking around what was found")
            near = around(self.assembled, first.points)
            found.append(self.fastest)
            found += [self.candidate(near, p) for p in frontier(near.problem, points=POINTS).points]
        found.append(self.leanest)
        return unbeaten(found), first.exact and self.assembled.whole


def unbeaten(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in both, fastest first."""
    kept: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.time, c.memory)):
        if not kept or c.memory < kept[-1].memory:
            kept.append(c)
    return tuple(kept)
