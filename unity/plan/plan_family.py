"""The record shared by the plans of one frontier: the function, its graph, its transformations and the search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from unity.constraints.bound import Bound
from unity.pcg.capture.capture import Captured
from unity.pcg.jaxprs.mesh_context import without_mesh
from unity.search.session import Candidate, Search
from unity.search.substitution.trace import RuleApplication
from unity.transforms.branches import Branching
from unity.transforms.packing import Joining
from unity.transforms.pipelining import Pipelining
from unity.transforms.rewriting import Rewriting


@dataclass(frozen=True)
class Tried:
    """The figures of one of the plans that `measure=True` chose from: seconds of a step by three ways, and bytes."""

    predicted: float  # seconds by the cost model
    memory: float  # bytes on one device, predicted
    simulated: float  # seconds
    measured: float | None = None  # seconds, if the plan was run


@dataclass(frozen=True, eq=False)
class PlanFamily:
    """The function, its graph and the search of all plans of one frontier.

    The transformations were applied in this order, where they are not None: rewriting, pipelining, branching, joining.
    """

    fn: Callable[..., Any]
    captured: Captured  # after all transformations
    search: Search
    seconds: float  # that the search took
    known: tuple[Candidate, ...] = ()  # points of the frontier that were read from a file
    known_exact: bool = False  # whether the known points are all that the frontier has
    rewriting: Rewriting | None = None
    pipelining: Pipelining | None = None
    branching: Branching | None = None
    applications: tuple[RuleApplication, ...] = ()  # of the search by substitution
    tried: tuple[Tried, ...] = ()  # the plans that this one was chosen from by measuring, itself first
    bound: Bound = field(default_factory=Bound)  # the user's constraints
    limit: float | None = None  # bytes on one device that a plan may need
    known_whole: bool = True  # whether the known points form a frontier, or are only some points of one
    joining: Joining | None = None
    interrupted: bool = False  # by Ctrl-C, before the search ended

    @property
    def searched(self) -> str:
        """The duration of the search as text, and whether it was interrupted."""
        return f"searched in {self.seconds:.2f} s" + (", interrupted: the best until then" if self.interrupted else "")

    @property
    def original(self) -> Captured:
        """The function as captured, before any transformation."""
        first = self.rewriting or self.pipelining or self.branching or self.joining
        return self.captured if first is None else first.before

    @cached_property
    def frontier(self) -> tuple[tuple[Candidate, ...], bool]:
        """The points of the frontier, fastest first, and whether these are all. The first access searches for them."""
        with without_mesh():
            return (self.known, self.known_exact) if self.known and self.known_whole else self.search.frontier

    @property
    def points(self) -> tuple[tuple[Candidate, ...], bool, bool]:
        """The frontier if it is known, else points that are quick to find; whether these are all; whether they are the frontier."""
        if "frontier" in vars(self):
            return (*self.frontier, True)
        return (self.known, self.known_exact, self.known_whole) if self.known else self.search.soon
