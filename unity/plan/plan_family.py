"""What the plans of one frontier share: the function, its graph, how it was rewritten, and the search that found them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from unity.constraints.bound import Bound
from unity.pcg.capture.capture import Captured
from unity.pcg.jaxprs.mesh_context import apart
from unity.search.session import Candidate, Search
from unity.search.substitution.trace import RuleApplication
from unity.transforms.branches import Branching
from unity.transforms.packing import Joining
from unity.transforms.pipelining import Pipelining
from unity.transforms.rewriting import Rewriting


@dataclass(frozen=True)
class Tried:
    """A plan that was looked at before one was chosen: seconds of a step as costs say, as simulated, and as run, if it was."""

    predicted: float
    memory: float  # bytes on one device, predicted
    simulated: float
    measured: float | None = None


@dataclass(frozen=True, eq=False)
class PlanFamily:
    """What all plans of one frontier share: the function, its graph, and the search that found them."""

    fn: Callable[..., Any]
    captured: Captured  # rewritten, if it was
    search: Search
    seconds: float  # that the search took
    known: tuple[Candidate, ...] = ()  # points of the frontier that were read from a file
    known_exact: bool = False
    rewriting: Rewriting | None = None  # how the captured function was rewritten, if it was
    pipelining: Pipelining | None = None  # and what was made a pipeline then
    branching: Branching | None = None  # and which branches went to devices of their own
    applications: tuple[RuleApplication, ...] = ()  # what the search by substitution did
    tried: tuple[Tried, ...] = ()  # the plans that this one was chosen from by measuring, itself first
    bound: Bound = field(default_factory=Bound)  # what the user constrains
    limit: float | None = None  # bytes on one device that a plan may need
    known_whole: bool = True  # the points that are known are the frontier
    joining: Joining | None = None  # which weights are joined before the program runs
    interrupted: bool = False  # by Ctrl-C, before all was looked at

    @property
    def searched(self) -> str:
        """How long the search took, and whether it came to its end."""
        return f"searched in {self.seconds:.2f} s" + (", interrupted: the best until then" if self.interrupted else "")

    @property
    def original(self) -> Captured:
        """The function as captured."""
        first = self.rewriting or self.joining or self.pipelining or self.branching
        return self.captured if first is None else first.before

    @cached_property
    def frontier(self) -> tuple[tuple[Candidate, ...], bool]:
        """All points, fastest first, and whether they are all there are. Searched for when first asked for."""
        with apart():
            return (self.known, self.known_exact) if self.known and self.known_whole else self.search.frontier

    @property
    def points(self) -> tuple[tuple[Candidate, ...], bool, bool]:
        """The frontier, if it is known, else some points of it; whether they are all there are; whether they are the frontier."""
        if "frontier" in vars(self):
            return (*self.frontier, True)
        return (self.known, self.known_exact, self.known_whole) if self.known else self.search.soon
