"""The best solution of a program, of the programs that rules rewrite it to, and of the program with padded dimensions."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace

from unity.constraints.kinds import OperatorPin
from unity.plan.plan_family import PlanFamily
from unity.planning.ranking import Solution
from unity.planning.request import Request
from unity.search.joint.pricing import Prices
from unity.search.request import Wish
from unity.transforms.packing import joining_of
from unity.transforms.padding import best as best_padding


def solution_of(request: Request, program: PlanFamily, prices: Prices) -> Solution | None:
    """Return a program's best solution that fits.

    Where weights may be packed, the program with its joined weights packed is searched, too, and the better one returned.
    """
    candidate = request.fitting(program.search)
    solution = None if candidate is None else (program, candidate)
    joining = joining_of(program.captured, prices.machine.devices, prices.bodies) if prices.pack else None
    if joining is None:
        return solution
    request.say("joining weights")
    search = request.search(joining.after, prices)
    candidate = request.fitting(search)
    if candidate is None or (solution is not None and request.worth(candidate) >= request.worth(solution[1])):
        return solution
    return program.then(joining, search), candidate


def rewritten(
    request: Request, program: PlanFamily, prices: Prices
) -> Generator[Solution, None, tuple[PlanFamily, Solution | None]]:
    """Yield the solutions of a program and of the best program that it is rewritten to.

    Returns the better program, and its solution if any fits.
    """
    best, chosen, interrupted = solution_of(request, program, prices), None, False
    if best is not None:
        yield best
        loops = _with_loop_rules(request, program, prices, best)
        if loops is not None:
            program, best = loops[0], loops
            yield best
    captured = program.captured
    if best is not None or prices.pack:  # a rewritten program may fit, with its weights joined, where the captured one does not
        weight = math.inf if best is None else request.weight(best[0].search)
        chosen, interrupted = request.rewriter.best(captured, replace(prices, weight=weight), request.say)
    if chosen is not None:
        after = program.then(chosen, request.search(chosen.after, prices))
        solution = solution_of(request, after, prices)
        if solution is not None and (best is None or request.is_better(solution, best)):
            program, best = after, solution
            yield best
    if interrupted:  # skip the parts that would follow
        raise KeyboardInterrupt
    return program, best


def _with_loop_rules(request: Request, program: PlanFamily, prices: Prices, than: Solution) -> Solution | None:
    """Return a program after rules of loops, or None if none fits and is better than the solution without, `than`.

    A pin of an operator's result names dimensions that the result of all steps does not have in these places.
    """
    if any(isinstance(c, OperatorPin) for c in request.bound.every):
        return None
    weighted = replace(prices, weight=request.weight(than[0].search))
    for rewriting in request.rewriter.best_of_loops(program.captured, weighted, than[1].time, request.say):
        solution = solution_of(request, program.then(rewriting, request.search(rewriting.after, prices)), prices)
        better = request.if_better(solution, than, None) if solution is not None else None
        if better is not None:
            return better
    return None


def with_padding(request: Request, program: PlanFamily, prices: Prices, than: Solution | None) -> Solution | None:
    """Return a program with padded dimensions, or None if none fits and is better than the solution without, `than`."""
    wish = request.wish(Wish, prices, than)
    best = best_padding(program.captured, prices.machine, wish, prices.pack, prices.bodies)
    if best is None:
        return None
    return request.if_better((program.then(best.transformation, best.search), best.candidate), than, None)
