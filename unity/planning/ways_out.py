"""The error message if nothing fits the memory limit, with the options that are off and would help."""

from __future__ import annotations

from dataclasses import replace

from unity.base.formatting import size
from unity.pcg.parallel.stages import Mixed
from unity.plan.plan_family import PlanFamily
from unity.planning.device_groups import may_pipeline
from unity.planning.recomputed_programs import recomputing_choice, with_all_layers_recomputed
from unity.planning.refusal import LeanPipelines, LimitedPrograms, refusal
from unity.planning.request import Request
from unity.search.cost.state_sizes import StateMemory
from unity.search.joint.pricing import Prices
from unity.search.session import Search
from unity.transforms.micro_batching import leanest_micro_batches
from unity.transforms.recomputing import RecomputingChoice


def refusal_message(
    request: Request,
    program: PlanFamily,
    prices: Prices,
    choice: RecomputingChoice | None,
    batched: LimitedPrograms,
    pipelines: LeanPipelines,
) -> str:
    """Return the error message if nothing fits.

    Args:
        program: the program.
        prices: the prices of operators.
        choice: the choice of recomputed layers, if the option allows any.
        batched: the programs over micro-batches that were tried.
        pipelines: the pipelines that were tried.
    """
    way = _state_on_host(request, program.search) + _micro_batches(request, program, prices)
    way += "" if choice is not None else _recomputing(request, program, prices)
    others = batched if choice is None else LimitedPrograms.of(choice) + batched
    tried = LimitedPrograms((program.search, *others.tried), (program.search, *others.searched))
    others_allowed = request.transforms.recompute or request.transforms.micro_batches or may_pipeline(request, prices.machine)
    is_state_alone = request.is_hopeless(program.search) and bool(others_allowed)
    return refusal(prices.machine, request.limit, tried, way, pipelines, request.padding_allowed, is_state_alone)


def _recomputing(request: Request, program: PlanFamily, prices: Prices) -> str:
    """Return recomputed layers as a way out of a memory limit, if the option is off and they may fit."""
    # Under a limit of 0, programs are listed only for how much memory they need at least.
    leanest = recomputing_choice(request, program, prices, None, limit=0.0).leanest
    if leanest is None or leanest.least_memory.total >= program.search.least_memory.total:
        return ""
    least = leanest.least_memory.total
    return f"recompute=True, with at least {size(least)}, or " if least <= request.limit else ""


def _state_on_host(request: Request, search: Search) -> str:
    """Return an optimizer's state on the host as a way out of a memory limit, if the option is off and it may fit."""
    state = request.training.state
    if state.memory is not StateMemory.DEVICE or search.machine.host is None:
        return ""
    training = replace(request.training, state=replace(state, memory=StateMemory.EITHER))
    least = replace(search, training=training).least_memory
    is_way_out = least.total < search.least_memory.total and least.total <= request.limit
    return f"offload=True, with at least {size(least.total)}, or " if is_way_out else ""


def _micro_batches(request: Request, program: PlanFamily, prices: Prices) -> str:
    """Return micro-batches as a way out of a memory limit, if the option is off and they may fit."""
    if request.transforms.micro_batches or program.search.least_memory.state > request.limit:
        return ""
    try:
        programs = [leanest_micro_batches(p.captured).after for p in with_all_layers_recomputed(request, program, prices)]
        least = min(request.search(p, prices).least_memory.total for p in programs)
    except Mixed:
        return ""
    return f"micro_batches=True, with at least {size(least)}, or " if least <= request.limit else ""
