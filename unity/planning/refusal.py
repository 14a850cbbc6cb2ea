"""The error message for a program that does not fit a memory limit, with the ways out that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from unity.machine.machine import Machine
from unity.planning.infeasible import out_of_reach, shortfall
from unity.search.memory.lower_bound import LeastMemory
from unity.search.session import Candidate, Search
from unity.transforms.least_number import LimitedChoice
from unity.transforms.transformation import Transformation

T = TypeVar("T", bound=Transformation)


@dataclass(frozen=True, eq=False)
class LeanPipelines:
    """The pipelines of a program, compared by how little memory they need.

    Attributes:
        leanest: the point of least memory of the pipeline with the least lower bound, if that is within the limit.
        bounds: the lower bounds on the memory of all pipelines that were tried.
    """

    leanest: Candidate | None = None
    bounds: Sequence[LeastMemory] = ()


@dataclass(frozen=True, eq=False)
class LimitedPrograms:
    """The programs of a function that were tried under a memory limit.

    Attributes:
        tried: the searches of all of them. Bounds excluded some.
        searched: the searches among them that were asked for a strategy that fits.
    """

    tried: Sequence[Search] = ()
    searched: Sequence[Search] = ()

    @staticmethod
    def of(choice: LimitedChoice[T]) -> LimitedPrograms:
        """Return the programs that a choice was made from."""
        return LimitedPrograms(choice.tried, choice.searched)

    def __add__(self, other: LimitedPrograms) -> LimitedPrograms:
        return LimitedPrograms((*self.tried, *other.tried), (*self.searched, *other.searched))

    @property
    def bounds(self) -> list[LeastMemory]:
        """The lower bounds on the memory of all programs, the least first."""
        return sorted((search.least_memory for search in self.tried), key=lambda bound: bound.total)

    def leanest(self, limit: float) -> Candidate | None:
        """Return the leanest strategy of the programs that were searched; None if bounds exclude that any program fits a limit."""
        within = [search for search in self.searched if search.least_memory.total <= limit]
        within = within or [search for search in self.tried if search.least_memory.total <= limit][:1]
        return min((search.leanest for search in within), key=lambda candidate: (candidate.memory, candidate.time), default=None)


def refusal(
    machine: Machine,
    limit: float,
    programs: LimitedPrograms,
    way: str = "",
    pipelines: LeanPipelines | None = None,
    padding: bool = False,
    is_state_alone: bool = False,
) -> str:
    """Return the error message for a function none of whose programs fits.

    Args:
        machine: the machine that was planned for.
        limit: the memory limit, in bytes on one device.
        programs: the programs that were tried and are no pipelines.
        way: a way out.
        pipelines: the pipelines of the program, if they may be the plan.
        padding: whether the options allow padded dimensions; the message then says that the plan that it names has none.
        is_state_alone: whether programs that the options allow were not tried, as the state alone exceeds the limit.
    """
    pipelines = pipelines or LeanPipelines()
    leanest, (least, *others) = programs.leanest(limit), programs.bounds
    without, undivided = " without padded dimensions" if padding else "", least.anywhere
    pipeline = pipelines.leanest
    if pipeline is not None and pipeline.memory < (least.total if leanest is None else leanest.memory):
        return shortfall(machine, pipeline, limit, f"the leanest plan that was tried, a pipeline{without},", way, undivided)
    if leanest is not None:
        return shortfall(machine, leanest, limit, f"the leanest plan{without}", way, undivided)
    if is_state_alone:
        return out_of_reach(machine, least.of_state, limit, way)
    tried = " that was tried" if others else ""
    if pipeline is not None:  # it needs more than the bound on plans without one, which were not searched
        return out_of_reach(machine, least, limit, way, f"the leanest plan that is no pipeline{tried and ' and was tried'}")
    least = min((least, *pipelines.bounds), key=lambda bound: bound.total)
    return out_of_reach(machine, least, limit, way, f"the leanest plan{tried}")
