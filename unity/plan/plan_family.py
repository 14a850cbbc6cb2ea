"""The record shared by the plans of one frontier: the function, its graph, its transformations and the search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from unity.constraints.bound_constraints import BoundConstraints
from unity.pcg.capture.capture import Captured
from unity.pcg.jaxprs.trace_contexts import without_mesh
from unity.search.session import Candidate, Search
from unity.search.substitution.trace import RuleApplication
from unity.transforms.transformation import Transformation, transformed

T = TypeVar("T", bound=Transformation)


@dataclass(frozen=True)
class Tried:
    """The figures of one of the plans that `measure=True` chose from: seconds of a step by three ways, and bytes."""

    predicted: float  # seconds by the cost model
    memory: float  # bytes on one device, predicted
    simulated: float  # seconds
    measured: float | None = None  # seconds, if the plan was run; those of moving optimizer state are predicted


@dataclass(frozen=True, eq=False)
class PlanFamily:
    """The function, its graph, its transformations in order, and the search of all plans of one frontier."""

    fn: Callable[..., Any]
    original: Captured  # before any transformation
    search: Search
    seconds: float  # that the search took
    known: tuple[Candidate, ...] = ()  # points of the frontier that were read from a file
    known_exact: bool = False  # whether the known points are all that the frontier has
    transformations: tuple[Transformation, ...] = ()
    applications: tuple[RuleApplication, ...] = ()  # of the search by substitution
    tried: tuple[Tried, ...] = ()  # the plans that this one was chosen from by measuring, itself first
    bound: BoundConstraints = field(default_factory=BoundConstraints)  # the user's constraints
    limit: float | None = None  # bytes on one device that a plan may need
    known_whole: bool = True  # whether the known points form a frontier, or are only some points of one
    interrupted: bool = False  # by Ctrl-C, before the search ended
    may_overlap: bool = False  # whether overlap=True, which was not given, may lead to another plan

    @property
    def name(self) -> str:
        """The name of the function, by which messages and summaries call its plans."""
        return getattr(self.fn, "__name__", "plan")

    @property
    def searched(self) -> str:
        """The duration of the search as text, and whether it was interrupted."""
        return f"searched in {self.seconds:.2f} s" + (", interrupted: the best until then" if self.interrupted else "")

    @cached_property
    def stopped(self) -> frozenset[str]:
        """The paths of arguments whose gradients its transformations leave out."""
        return frozenset[str]().union(*(t.stopped for t in self.transformations))

    @property
    def captured(self) -> Captured:
        """The function as captured, after all transformations."""
        return transformed(self.original, self.transformations)

    @property
    def differentiated(self) -> frozenset[int]:
        """The numbers of the arguments that a step computes gradients of."""
        return self.captured.differentiated if self.search.training.backward else frozenset()

    def transformation(self, kind: type[T]) -> T | None:
        """Return the transformation of a type, or None."""
        return next((t for t in self.transformations if isinstance(t, kind)), None)

    def then(self, transformation: Transformation, search: Search) -> PlanFamily:
        """Return the family after one more transformation, with the search of the program that it leads to."""
        return replace(self, search=search, transformations=(*self.transformations, transformation))

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
