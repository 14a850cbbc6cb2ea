"""The error message for a program that does not fit a memory limit, with the ways out that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unity.base.formatting import size
from unity.plan.options import out_of_reach, shortfall
from unity.search.memory.lower_bound import LeastMemory
from unity.search.session import Candidate, Search


@dataclass(frozen=True, eq=False)
class LeanPipelines:
    """The pipelines of a program, compared by how little memory they need.

    Attributes:
        leanest: the point of least memory of the pipeline with the least lower bound, if that is within the limit.
        bounds: the lower bounds on the memory of all pipelines that were tried.
    """

    leanest: Candidate | None = None
    bounds: Sequence[LeastMemory] = ()


def refusal(
    search: Search,
    limit: float,
    recomputed: Search | None,
    recomputes: bool,
    way: str = "",
    pipelines: LeanPipelines | None = None,
    padding: bool = False,
) -> str:
    """Return the error message for a program that does not fit.

    Args:
        search: the search of the program.
        limit: the memory limit, in bytes on one device.
        recomputed: the search of the program whose recomputed layers leave the least bound on memory, if there is any.
        recomputes: whether the options allow recomputed layers.
        way: a way out besides recomputed layers.
        pipelines: the pipelines of the program, if they may be the plan.
        padding: whether the options allow padded dimensions; the message then says that the plan that it names has none.
    """
    if recomputed is not None and recomputed.least_memory.total < search.least_memory.total:
        if recomputes:
            search = recomputed
        elif recomputed.least_memory.total <= limit:
            way += f"recompute=True, with at least {size(recomputed.least_memory.total)}, or "
    pipelines = pipelines or LeanPipelines()
    leanest = search.leanest if search.least_memory.total <= limit else None
    without = " without padded dimensions" if padding else ""
    pipeline = pipelines.leanest
    if pipeline is not None and pipeline.memory < (search.least_memory.total if leanest is None else leanest.memory):
        return shortfall(search.machine, pipeline, limit, f"the leanest plan that was tried, a pipeline{without},", way)
    if leanest is not None:
        return shortfall(search.machine, leanest, limit, f"the leanest plan{without}", way)
    if pipeline is not None:  # it needs more than the bound on plans without one, which were not searched
        return out_of_reach(search.machine, search.least_memory, limit, way, "the leanest plan that is no pipeline")
    least = min((search.least_memory, *pipelines.bounds), key=lambda bound: bound.total)
    return out_of_reach(search.machine, least, limit, way)
