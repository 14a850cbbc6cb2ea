"""One search: a graph on a machine, assembled once, asked for the fastest plan, the leanest, or the whole frontier."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from unity.pcg.graph import PCG
from unity.pcg.parallelize import Assignment, parallelize
from unity.search.assemble import Assembled, assemble
from unity.search.cost import Training
from unity.search.frontier import frontier, frontier_under
from unity.search.machine import Machine
from unity.search.memory import predict_memory
from unity.search.minimizer import Minimizer
from unity.search.problem import Point

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

    def candidate(self, point: Point) -> Candidate:
        """A point as a strategy. What it holds for a moment is no sum, so only here it is known."""
        assignment = self.assembled.assignment(point)
        found = predict_memory(parallelize(self.graph, assignment), self.differentiated, self.training)
        return Candidate(point.time, found.total, assignment)

    @cached_property
    def fastest(self) -> Candidate:
        """The least predicted time, whatever the memory."""
        return self.candidate(self.minimizer.at([0.0])[0])

    @cached_property
    def leanest(self) -> Candidate:
        """The least predicted memory."""
        return self.candidate(self.minimizer.at([math.inf])[0])

    def under(self, memory: float) -> Candidate | None:
        """The fastest found that fits into so many bytes per device; None if the leanest does not.

        The search leaves out what is held for a moment, so it is given less room, by as much as the last plan exceeded.
        """
        if self.fastest.memory <= memory:
            return self.fastest
        self.say("the fastest does not fit: searching the frontier for what does")
        room = memory
        for _ in range(TRIES):
            point = frontier_under(self.assembled.problem, room, self.minimizer)
            found = self.candidate(point) if point else None
            if point is None or found is None or found.memory <= memory:
                break
            room = point.memory - (found.memory - memory)
        else:
            found = None
        return found or (self.leanest if self.leanest.memory <= memory else None)

    @cached_property
    def frontier(self) -> tuple[tuple[Candidate, ...], bool]:
        """All points that no other beats, fastest first, and whether that is all there are (or the convex hull and more)."""
        self.say("searching the frontier")
        found = frontier(self.assembled.problem, points=POINTS, minimizer=self.minimizer)
        kept: list[Candidate] = []
        for candidate in map(self.candidate, found.points):
            if not kept or candidate.memory < kept[-1].memory:
                kept.append(candidate)
        return tuple(kept), found.exact

