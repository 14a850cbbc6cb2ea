"""The program over micro-batches, where the memory limit excludes the fastest strategy or the user chose their number."""

from __future__ import annotations

from collections.abc import Generator

from unity.base.errors import InfeasibleError, OptionError
from unity.base.user_warnings import warn_user
from unity.pcg.parallel.stages import Mixed
from unity.plan.plan_family import PlanFamily
from unity.planning.infeasible import not_decomposed
from unity.planning.ranking import Solution
from unity.planning.recomputed_programs import with_all_layers_recomputed
from unity.planning.refusal import LimitedPrograms, refusal
from unity.planning.request import Request
from unity.search.joint.joint import GAIN
from unity.search.joint.pricing import Prices
from unity.transforms.micro_batching import MicroBatchingWish
from unity.transforms.micro_batching import best as best_micro_batches


def micro_batched(
    request: Request, program: PlanFamily, prices: Prices, than: Solution | None
) -> Generator[Solution, None, tuple[Solution | None, LimitedPrograms]]:
    """Yield the program over micro-batches, without and with all layers recomputed, where that is better than `than`.

    Returns the best solution, `than` included, and the programs that were tried. If the user chose their number, `than` does
    not count; otherwise they are tried only if the limit excludes its fastest strategy. Raises OptionError if the program
    cannot have that number, InfeasibleError if nothing fits with it.
    """
    required, best = request.transforms.required_micro_batches, than
    tried = LimitedPrograms()
    if request.inner_constraints:
        number, first = request.transforms.micro_batches, request.inner_constraints[0]
        raise OptionError(f"micro_batches={number}, but {first} constrains the function: leave one out")
    if required is not None:
        than = None
    elif than is not None and not request.is_limited(than):
        return best, tried
    for variant in with_all_layers_recomputed(request, program, prices):
        wish = request.wish(MicroBatchingWish, prices, than, limit=request.limit)
        try:
            choice = best_micro_batches(variant.captured, wish, required)
        except Mixed as reason:
            if required is not None:
                raise OptionError(not_decomposed(required, str(reason))) from None
            warn_user(f"micro_batches=True: the plan has none, since {reason} (docs: memory#micro-batches)")
            break
        tried += LimitedPrograms.of(choice)
        if choice.best is not None:
            solution = variant.then(choice.best.transformation, choice.best.search), choice.best.candidate
            if than is None or request.is_better(solution, than):
                than = best = solution
                yield solution
        if than is not None and than[1].time <= (1 + GAIN) * program.search.fastest.time:
            break
    if required is not None and than is None:
        raise InfeasibleError(refusal(program.search.machine, request.limit, tried))
    return best, tried
