"""Programs with layers that the backward pass recomputes, where the memory limit excludes the fastest strategy."""

from __future__ import annotations

from collections.abc import Generator

from unity.plan.plan_family import PlanFamily
from unity.planning.ranking import Solution
from unity.planning.request import Request
from unity.planning.rewritten_programs import rewritten
from unity.search.cost.operator_runs import stacking_seconds
from unity.search.joint.pricing import Prices
from unity.transforms.recomputing import RecomputingChoice, RecomputingWish, best_steps_of_scans, of_all_layers
from unity.transforms.recomputing import best as best_recomputing

STACKING = 0.02  # the part of a step's time that loops take to stack values, beyond which their steps may recompute some


def recomputing_choice(
    request: Request, program: PlanFamily, prices: Prices, than: Solution | None, limit: float | None = None
) -> RecomputingChoice:
    """Return the best choice of recomputed layers of a program.

    Args:
        program: the program.
        prices: the prices of operators.
        than: the solution that keeps all layers and is to be beaten, unless the plan must have another transformation. It can
            be beaten only if the limit excludes the fastest strategy, or if much of its time goes into what loops stack.
        limit: the memory limit, if it is not that of the request.
    """
    if than is None and request.is_hopeless(program.search):
        return RecomputingChoice()
    if than is not None and request.transforms.has_required:
        return RecomputingChoice()
    offload = request.transforms.offload and prices.machine.host is not None
    limit = request.limit if limit is None else limit
    wish = request.wish(RecomputingWish, prices, than, limit=limit, offload=offload)
    if than is None or request.is_limited(than):
        return best_recomputing(program.captured, wish)
    search, launch = program.search, prices.machine.device.launch
    stacking = stacking_seconds(search.graph, search.differentiated, launch) if search.counted else 0.0
    is_worth_a_try = request.objective != "memory" and stacking > STACKING * than[1].time
    return best_steps_of_scans(program.captured, wish) if is_worth_a_try else RecomputingChoice()


def with_recomputation(
    request: Request, program: PlanFamily, prices: Prices, than: Solution | None, choice: RecomputingChoice | None
) -> Generator[Solution, None, tuple[list[PlanFamily], Solution | None]]:
    """Yield the solutions of a program with chosen layers recomputed, where they are better than `than`.

    Where nothing fits without, the recomputed program is rewritten, too.

    Returns the programs that further transformations start from, and the best solution, `than` included.
    """
    if choice is None or choice.best is None:
        return [program], than
    recomputing = program.then(choice.best.transformation, choice.best.search)
    if than is None:
        recomputing, best = yield from rewritten(request, recomputing, prices)
        return [program, recomputing], best
    solution = recomputing, choice.best.candidate
    if not request.is_better(solution, than):
        return [program], than
    yield solution
    return [program, recomputing], solution


def with_all_layers_recomputed(request: Request, program: PlanFamily, prices: Prices) -> list[PlanFamily]:
    """Return a program, and the one in which all of its layers are recomputed, if it has any and the options allow that."""
    recomputing = of_all_layers(program.captured) if request.transforms.recompute else None
    if recomputing is None:
        return [program]
    return [program, program.then(recomputing, request.search(recomputing.after, prices))]
