"""One request to `unity.optimize`, and the comparison of solutions by its objective, its memory limit and its constraints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from unity.constraints.bound_constraints import BoundConstraints
from unity.constraints.conflicts import possible
from unity.constraints.kinds import Constraint, Pin
from unity.constraints.paths import matching
from unity.exec.measure.trial import ratio
from unity.pcg.capture.capture import Captured
from unity.plan.further_options import Transforms
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.plan.step import can_run, step_of
from unity.planning.ranking import Solution
from unity.search.cost.cost import Training
from unity.search.joint.joint import GAIN
from unity.search.joint.pricing import Prices
from unity.search.request import Wish
from unity.search.session import Candidate, Search
from unity.search.space.masks import marked
from unity.transforms.rewriting import Rewriter

W = TypeVar("W", bound=Wish)


@dataclass(frozen=True, eq=False)
class Request:
    """A request for a plan: everything that `unity.optimize` is called with but the machine.

    Attributes:
        kind: the name of the search.
        local: whether the plan is for the devices of this process, where programs can be run to confirm the costs.
        overlap: whether the simulated step is minimized on machines whose devices compute while they communicate.
        measure: whether plans that are predicted to be nearly as fast as the fastest are run, too.
        say: shows the current stage to the user.
        names_conflicts: whether an error names the constraints that leave no plan, which takes one more search for each constraint.
    """

    fn: Callable[..., Any]
    captured: Captured
    training: Training
    objective: str
    limit: float
    seed: int
    kind: str
    budget: float | None
    rewriter: Rewriter
    local: bool
    overlap: bool
    measure: bool
    say: Callable[[str], None]
    bound: BoundConstraints
    transforms: Transforms
    names_conflicts: bool = True

    def search(self, captured: Captured, prices: Prices, thorough: bool = True) -> Search:
        """Return the search of a program's parallelizations, which shares listed and priced operators with other searches."""
        graph, differentiated = captured.graph, captured.differentiated
        restrict = self.bound if self.bound.every else marked  # which needs no look at the program's dimensions
        return Search(graph, differentiated, prices.machine, self.training, self.say, prices.listed, restrict, thorough=thorough)

    def best(self, search: Search) -> Candidate | None:
        """Return the best point by the objective, or None if none fits the limit or obeys the constraints."""
        if self.is_excluded(search):
            return None
        return search.leanest if self.objective == "memory" else search.under(self.limit)

    def is_excluded(self, search: Search) -> bool:
        """Return whether the constraints exclude all strategies of a program."""
        return bool(self.bound.every and not possible(search))

    def is_hopeless(self, search: Search) -> bool:
        """Return whether the constraints exclude all strategies of a program, or its state alone exceeds the limit."""
        return self.is_excluded(search) or search.least_memory.state > self.limit

    def is_limited(self, solution: Solution) -> bool:
        """Return whether the limit excludes the fastest strategy of a solution's program; False if the objective is memory."""
        return self.objective != "memory" and solution[0].search.fastest.memory > self.limit

    def fitting(self, search: Search) -> Candidate | None:
        """Return the best point by the objective, or None if no point fits the limit."""
        candidate = self.best(search)
        return candidate if candidate is not None and candidate.memory <= self.limit else None

    def worth(self, c: Candidate) -> tuple[float, float]:
        """Return the figures that the objective minimizes, in lexicographic order."""
        return (c.memory, c.time) if self.objective == "memory" else (c.time, c.memory)

    def weight(self, search: Search) -> float:
        """Return the seconds that a byte of memory counts as where rewritings are priced."""
        if self.objective == "memory":
            return math.inf
        return 0.0 if search.fastest.memory <= self.limit else search.rate

    def is_better(self, one: Solution, other: Solution) -> bool:
        """Return whether a solution is better than another by the required gain, as predicted, and if possible as measured.

        If the plan is for this process's devices, they must be able to run the better one, and it must not run more slowly.
        """
        new, old = one[1], other[1]
        leaner, faster = new.memory < (1 - GAIN) * old.memory, new.time < (1 - GAIN) * old.time
        better = leaner if self.objective == "memory" else new.memory <= self.limit and faster
        if not (better and self.local):
            return better
        if not can_run(Plan(*one)):
            return False
        return self.objective == "memory" or not can_run(Plan(*other)) or not self.is_slower(one, other)

    def is_slower(self, one: Solution, other: Solution) -> bool:
        """Run both programs on this process's devices, and return whether a step of the first takes longer."""
        self.say("running both programs")
        return ratio(step_of(Plan(*one), self.training), step_of(Plan(*other), self.training)) > 1

    def if_better(self, solution: Solution, than: Solution | None, required: object | None) -> Solution | None:
        """Return a solution if the plan must have its transformation, or if it is better than another; otherwise None."""
        return solution if than is None or required is not None or self.is_better(solution, than) else None

    def wish(self, wish_type: type[W], prices: Prices, than: Solution | None, required: object | None = None, **more: Any) -> W:
        """Return a wish of a type: what the search for a transformed program needs, with the fields that this type adds.

        The search may discard whatever cannot beat `than`, unless the transformation is required or the objective is memory.
        """
        beaten = (than[0].search, than[1]) if than is not None and required is None and self.objective != "memory" else None
        search = partial(self.search, prices=prices, thorough=required is not None)
        return wish_type(search=search, choose=self.fitting, worth=self.worth, than=beaten, say=self.say, **more)

    def runnable(self, family: PlanFamily, best: Candidate) -> Candidate:
        """Return the best point of a frontier that this process's devices can run.

        This is `best` itself if they can run it, if they can run none, or if the plan is for another machine.
        """
        if not self.local or can_run(Plan(family, best)):
            return best
        self.say("looking for what these devices can run")
        others = [c for c in family.frontier[0] if c.memory <= self.limit and can_run(Plan(family, c))]
        return min(others, key=self.worth, default=best)

    @property
    def pinned(self) -> frozenset[int]:
        """The numbers of the pinned arguments, none of which is packed."""
        pins = [c.path for c in self.bound.every if isinstance(c, Pin)]
        return frozenset(k for path in pins for k in matching(path, self.bound.paths))

    def unpackable(self, program: PlanFamily) -> frozenset[int]:
        """Return the numbers of the arguments that no further transformation may pack.

        These are those pinned or packed already, and weights with more or less of the optimizer's state than most, since a packed
        array has one size of it.
        """
        names = {name for name, _ in self.training.state.others}
        unlike = {k for k, path in enumerate(self.captured.paths) if path in names}
        return self.pinned.union(unlike, *(s.numbers for t in program.transformations for s in t.packing.slots))

    @property
    def inner_constraints(self) -> list[Constraint]:
        """The constraints that pipelines and micro-batches do not leave as they are: all but pins of arguments."""
        return [c for c in self.bound.every if not isinstance(c, Pin)]

    @property
    def padding_allowed(self) -> bool:
        """Whether the plan may have padded dimensions."""
        return self.transforms.padding and not self.bound.every
