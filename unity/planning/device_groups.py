"""Programs on groups of devices: as pipelines, with branches on separate groups, or both."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from unity.base.errors import InfeasibleError, OptionError
from unity.base.formatting import size
from unity.constraints.kinds import Across
from unity.machine.machine import Machine
from unity.pcg.ir.payloads import ScheduleKind
from unity.pcg.parallel.parallelize import Assignment
from unity.plan.plan_family import PlanFamily
from unity.planning.infeasible import no_branches, no_pipeline
from unity.planning.ranking import Solution
from unity.planning.refusal import LeanPipelines
from unity.planning.request import Request
from unity.search.joint.pricing import Prices
from unity.search.memory.lower_bound import LeastMemory
from unity.search.session import Candidate, Search
from unity.transforms.branches import BranchesWish, Forked
from unity.transforms.branches import best as best_branches
from unity.transforms.pipelining import PipelineCandidate, PipelineWish
from unity.transforms.pipelining import best as best_of_equal_stages
from unity.transforms.pipelining import best_unlike as best_of_unlike_stages


def on_groups(
    request: Request, programs: Sequence[PlanFamily], prices: Prices, than: Solution | None
) -> Generator[Solution, None, Solution | None]:
    """Yield the solutions of some programs on groups of devices, where they are better than `than`.

    Returns the best solution, `than` included unless the plan must have something else. Raises InfeasibleError if every program
    refuses what the plan must have, or if some do and no solution is known.
    """
    best, refusals, required = than, list[InfeasibleError](), list[Solution]()
    for program in programs:
        before = than if request.transforms.has_required else best
        try:
            for solution in _on_groups_of(request, program, prices, before):
                best = solution
                yield best
        except InfeasibleError as error:
            refusals.append(error)
            best = before  # what was reached lacks something that the plan must have
            continue
        if request.transforms.has_required and best is not None and best is not before:
            required.append(best)
    if refusals and (best is None or len(refusals) == len(programs)):
        raise refusals[-1]
    if len(required) > 1:
        best = min(required, key=lambda solution: request.worth(solution[1]))
        yield best
    return best


def _on_groups_of(request: Request, program: PlanFamily, prices: Prices, than: Solution | None) -> Iterator[Solution]:
    """Yield the program with a pipeline, with branches on separate groups of devices, or with both, if better than `than`."""
    pipelined = _pipelined(request, program, prices, than)
    if pipelined is not None:
        yield pipelined
    last = _pipelined_or_branched(request, program, prices, than, pipelined)
    if last is not None:
        yield last


def _pipelined_or_branched(
    request: Request, program: PlanFamily, prices: Prices, than: Solution | None, pipelined: Solution | None
) -> Solution | None:
    """Return the program with a pipeline, with branches on separate groups of devices, or with both.

    Branches are tried on the best program with a pipeline, if there is one. Returns None if none of these fits and is better
    than the solution without them, `than`. Raises InfeasibleError if the plan must have branches and none fit.
    """
    solution, refused = _branched(request, pipelined[0] if pipelined is not None else program, prices, pipelined or than)
    groups = request.transforms.branch_groups
    if groups is None:
        return solution or pipelined
    if pipelined is not None and request.transforms.pipeline is None:  # branches may be better, or only exist, without it
        other, more = _branched(request, program, prices, than)
        both, refused = [s for s in (solution, other) if s is not None], [*refused, *more]
        solution = min(both, key=lambda s: request.worth(s[1]), default=None)
    if solution is None:
        raise InfeasibleError(no_branches(prices.machine, groups, list(dict.fromkeys(refused)), size(request.limit)))
    return solution


def _pipelined(request: Request, program: PlanFamily, prices: Prices, than: Solution | None) -> Solution | None:
    """Return the program with a pipeline, or None if none fits and is better than the solution without one, `than`."""
    required = request.transforms.pipeline
    numbers = None if required is None else (required.stages, required.micro_batches)
    schedule = None if required is None or required.schedule is None else ScheduleKind(required.schedule)
    if required is not None and request.inner_constraints:
        raise OptionError(f"pipeline={required!r}, but {request.inner_constraints[0]} constrains the function: leave one out")
    if not may_pipeline(request, prices.machine):
        return None
    wish = request.wish(PipelineWish, prices, than, required, exactly=numbers, schedule=schedule)
    best, refused = _best_pipeline(request, program, prices.machine, wish)
    if best is None:
        if required is not None:
            raise InfeasibleError(no_pipeline(prices.machine, required, refused, size(request.limit)))
        return None
    return request.if_better((program.then(best.transformation, best.search), best.candidate), than, required)


def may_pipeline(request: Request, machine: Machine) -> bool:
    """Return whether the options, the constraints and the number of devices allow a pipeline."""
    if not request.transforms.pipelines or request.inner_constraints:
        return False
    return machine.devices > 1 or request.transforms.pipeline is not None


def _best_pipeline(
    request: Request, program: PlanFamily, machine: Machine, wish: PipelineWish
) -> tuple[PipelineCandidate | None, list[str]]:
    """Return the best pipeline of equal stages, or else of unlike ones, and the reasons why others were refused."""
    best, refused = best_of_equal_stages(program.captured, machine, wish)
    if best is not None:
        return best, refused
    best, more = best_of_unlike_stages(program.captured, machine, wish, request.transforms.pack, request.unpackable(program))
    return best, [*refused, *more]


def _branched(request: Request, program: PlanFamily, prices: Prices, than: Solution | None) -> tuple[Solution | None, list[str]]:
    """Return the program with branches on separate groups of devices, and the reasons against those that were refused.

    The first is None if none fits and is better than the solution without them, `than`.
    """
    required, machine = request.transforms.branch_groups, prices.machine
    excluding = [c for c in request.bound.every if isinstance(c, Across) and c.word == "only"]  # splits between branches, too
    if required is not None and excluding:
        raise OptionError(f"branch_groups={required}, but {excluding[0]} leaves nothing else: leave one out (docs: branches#which)")
    if not request.transforms.branches or excluding or (machine.devices == 1 and required is None):
        return None, []
    unpacked = request.unpackable(program)
    wish = request.wish(BranchesWish, prices, than, required, exactly=required, pack=request.transforms.pack, whole=unpacked)
    best, refused = best_branches(Forked.of(program.captured, program.transformations), machine, request.training, wish)
    if best is None:
        return None, refused
    family = program.then(best.transformation, best.search)
    candidate = best.candidate if required is None else request.runnable(family, best.candidate)
    return request.if_better((family, candidate), than, required), refused


def leanest_pipeline(request: Request, program: PlanFamily, prices: Prices) -> tuple[Solution | None, LeanPipelines]:
    """Return the pipeline with the least bound on memory, at its leanest point, and all that were tried.

    Without a pipeline, or if its bound exceeds the limit, the first is None.
    """
    bounds: list[LeastMemory] = []
    if request.is_hopeless(program.search) or not may_pipeline(request, prices.machine):
        return None, LeanPipelines()

    def bounded(search: Search) -> Candidate:  # stands for a point whose memory is the bound, since a search takes longer
        bounds.append(search.least_memory)
        return Candidate(math.inf, search.least_memory.total, Assignment((), {}, {}, {}))

    memory = replace(request, objective="memory")
    wish = replace(memory.wish(PipelineWish, prices, None), choose=bounded)
    best, _ = _best_pipeline(request, program, prices.machine, wish)
    if best is None or best.search.least_memory.total > request.limit:
        return None, LeanPipelines(bounds=bounds)
    leanest = best.search.leanest
    return (program.then(best.transformation, best.search), leanest), LeanPipelines(leanest, bounds)
