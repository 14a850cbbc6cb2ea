"""One search: a graph on a machine, assembled once, asked for the fastest plan, the leanest, or the whole frontier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from unity.pcg.graph import PCG
from unity.pcg.parallelize import Assignment, parallelize
from unity.search.assemble import Assembled, assemble
from unity.search.cost import Training
from unity.search.frontier import frontier, frontier_under
from unity.search.machine import Machine
from unity.search.memory import predict_memory
from unity.search.minimizer import Minimizer, minimize
from unity.search.problem import Point
from unity.search.refine import Measure, around, refined

POINTS = 24  # vertices of a frontier's hull


TRIES = 6  # searches for a plan that fits with its working sets


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
        found = predict_memory(parallelize(self.graph, assignment), self.differentiated, self.training)
        return Candidate(point.time, found.total, assignment)

    def best(self, weight: float, measure: Measure) -> tuple[Assembled, Point]:
        """What a first search finds, and a second one around it: a point, and the problem that it is one of."""
        (point,) = self.minimizer.at([weight])
        self.say("looking around what was found")
        return refined(self.assembled, point, lambda near: minimize(near.problem, [weight])[0], measure)

    @cached_property
    def fastest(self) -> Candidate:
        """The least predicted time, whatever the memory."""
        return self.candidate(*self.best(0.0, lambda p: p.time))

    @cached_property
    def leanest(self) -> Candidate:
        """The least predicted memory."""
        return self.candidate(*self.leanest_point)

    @cached_property
    def leanest_point(self) -> tuple[Assembled, Point]:
        """The least memory, and the problem that it is a point of."""
        return self.best(math.inf, lambda p: p.memory)

    def under(self, memory: float) -> Candidate | None:
        """The fastest found that fits into so many bytes per device; None if the leanest does not.

        The search leaves out what is held for a moment, so it is given less room, by as much as the last plan exceeded.
        """
        if self.fastest.memory <= memory:
            return self.fastest
        self.say("the fastest does not fit: searching the frontier for what does")
        room = memory
        for _ in range(TRIES):
            assembled, point = self.within(room)
            if point.memory > room:
                break
            found = self.candidate(assembled, point)
            if found.memory <= memory:
                return self.faster(assembled, point, room, found, memory)
            room = point.memory - (found.memory - memory)
        return self.leanest if self.leanest.memory <= memory else None

    def within(self, room: float) -> tuple[Assembled, Point]:
        """The fastest point of a first search in so much memory; if none fits, the leanest of all."""
        point = frontier_under(self.assembled.problem, room, self.minimizer)
        return (self.assembled, point) if point else self.leanest_point

    def faster(self, assembled: Assembled, point: Point, room: float, found: Candidate, memory: float) -> Candidate:
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
            found += [self.fastest, self.leanest]
            found += [self.candidate(near, p) for p in frontier(near.problem, points=POINTS).points]
        return unbeaten(found), first.exact and self.assembled.whole


def unbeaten(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in both, fastest first."""
    kept: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.time, c.memory)):
        if not kept or c.memory < kept[-1].memory:
            kept.append(c)
    return tuple(kept)
