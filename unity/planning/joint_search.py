"""The searches "unity" and "captured": the best solution over a captured program and its transformations.

Both start from the captured program. A rewritten program replaces it where that is better by the objective, and so does one with
padded dimensions, if the user allows it. If the limit excludes the fastest strategy of the better one, layers of that are
recomputed; if it excludes all, the program with recomputed layers is rewritten, too. Micro-batches are tried next, if the user
asks for them. Last, a pipeline, and branches on separate groups of devices, are tried on the result, on that with
recomputed layers, and on the captured program.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from unity.base.errors import InfeasibleError
from unity.base.interruption import UntilInterrupted
from unity.base.user_warnings import warn_user
from unity.constraints.conflicts import conflict
from unity.constraints.kinds import Constraint
from unity.machine.machine import Machine
from unity.plan.plan_family import PlanFamily
from unity.planning.device_groups import leanest_pipeline, on_groups
from unity.planning.micro_batched_programs import micro_batched
from unity.planning.ranking import Solution, fastest_simulated
from unity.planning.recomputed_programs import recomputing_choice, with_recomputation
from unity.planning.refusal import LeanPipelines, LimitedPrograms
from unity.planning.request import Request
from unity.planning.rewritten_programs import rewritten, with_padding
from unity.planning.ways_out import refusal_message
from unity.search.joint.joint import Budget
from unity.search.joint.pricing import Prices
from unity.search.memory.backend import backend_of


def joint_solution(request: Request, machine: Machine) -> Solution:
    """Return the best solution over the captured program and those that it may be transformed into.

    After Ctrl-C this is the best solution so far. Raises KeyboardInterrupt if no solution was reached, or if the plan must have
    a transformation that a solution so far may lack.
    """
    reached = UntilInterrupted(_improvements(request, machine))
    solutions = list(reached)
    if not reached.interrupted:
        return _overlapped(request, solutions, machine)
    if not solutions or request.transforms.has_required:
        raise KeyboardInterrupt
    family, candidate = solutions[-1]
    return replace(family, interrupted=True), candidate


def _overlapped(request: Request, solutions: Sequence[Solution], machine: Machine) -> Solution:
    """Return the solution with the shortest simulated step, over all programs that are nearly as fast as the last.

    The last has the least sum of operators and collectives. After Ctrl-C it stays.
    """
    best = solutions[-1]
    if not request.overlap or request.objective == "memory" or not backend_of(machine).overlaps:
        return best
    request.say("simulating what overlaps")
    try:
        return fastest_simulated(best, () if request.transforms.has_required else solutions, request.limit)
    except KeyboardInterrupt:
        return replace(best[0], interrupted=True), best[1]


def _improvements(request: Request, machine: Machine) -> Iterator[Solution]:
    """Yield solutions as the search proceeds. The last is the best.

    Raises InfeasibleError after the last if nothing fits, or if the plan must have a transformation that is infeasible. The
    error names the constraints to blame, if there is a plan without them.
    """
    try:
        refusal = yield from _attempts(request, machine)
    except InfeasibleError as error:  # the plan must have a transformation
        refusal = partial(str, error)
    if refusal is not None:
        conflicting = _conflict_on(request, machine) if request.names_conflicts and request.bound.every else None
        raise InfeasibleError(conflicting or refusal())


def _conflict_on(request: Request, machine: Machine) -> str | None:
    """Return the message about the smallest set of constraints that leaves no plan, or None if no plan exists without them."""
    search = request.search(request.captured, Prices(machine, request.training))
    required = request.transforms.required
    fits_at_any_limit = bool(required) and _has_plan(request, machine, request.bound.every, math.inf)
    limit = request.limit if not required or fits_at_any_limit else math.inf
    return conflict(request.bound, search, lambda some: _has_plan(request, machine, some, limit), limit, required)


def _has_plan(request: Request, machine: Machine, some: Sequence[Constraint], limit: float) -> bool:
    """Return whether there is a plan that obeys some of the constraints, by a search without rewriting.

    It ends at the first solution that fits, unless the plan must have a transformation.
    """
    rewriter = replace(request.rewriter, budget=Budget(programs=0))
    # A limit's search, unlike that for the least memory, ends where bounds exclude that anything fits.
    quick = replace(request, bound=request.bound.of(some), limit=limit, objective="time", rewriter=rewriter, local=False)
    attempts = _attempts(quick, machine)
    try:
        with warnings.catch_warnings(action="ignore"):
            solutions = list(attempts if request.transforms.has_required else islice(attempts, 1))
    except InfeasibleError:
        return False
    return bool(solutions)


def _attempts(request: Request, machine: Machine) -> Generator[Solution, None, Callable[[], str] | None]:
    """Yield solutions as the search proceeds, and return the error message, yet to be computed, if nothing fits.

    Raises InfeasibleError after the last if the plan must have a transformation that is infeasible.
    """
    prices = Prices(machine, request.training, bodies=request.captured.bodies, restrict=request.bound, pack=_may_pack(request))
    captured = PlanFamily(request.fn, request.captured, request.search(request.captured, prices), 0.0, bound=request.bound)
    if request.is_excluded(captured.search):  # transformations keep the arguments and their types, so they cannot help
        return partial(refusal_message, request, captured, prices, None, LimitedPrograms(), LeanPipelines())
    program, best = yield from rewritten(request, captured, prices)
    padded = with_padding(request, program, prices, best) if request.padding_allowed else None
    if padded is not None:
        program, best = padded[0], padded
        yield best
    choice = recomputing_choice(request, program, prices, best) if request.transforms.recompute else None
    programs, best = yield from with_recomputation(request, program, prices, best, choice)
    batched = LimitedPrograms()
    if request.transforms.micro_batches:
        best, batched = yield from micro_batched(request, program, prices, best)
        if request.transforms.required_micro_batches is not None:
            return None
    if program is not captured:  # rewriting may remove equal layers or branches, or join samples
        programs = [*programs, captured]
    best = yield from on_groups(request, programs, prices, best)
    if best is None:
        pipeline, pipelines = leanest_pipeline(request, program, prices)
        if pipeline is None or pipeline[1].memory > request.limit:
            return partial(refusal_message, request, program, prices, choice, batched, pipelines)
        yield pipeline
    return None


def _may_pack(request: Request) -> bool:
    """Return whether weights may be joined or stored padded. Warns if optimizer states that differ in size forbid it."""
    pack = request.transforms.pack and not request.bound.every
    if pack and request.training.state.others:
        warn_user(
            "pack=True: no weights are joined or stored padded, since the optimizer's state of some is larger than of others"
            " (docs: memory#optimizer-state)"
        )
        return False
    return pack
