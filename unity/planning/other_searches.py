"""Searches for comparison: rewriting before parallelization, parallelizing substitutions alone, and the published algorithms."""

from __future__ import annotations

from dataclasses import replace

from unity.base.errors import InfeasibleError
from unity.machine.machine import Machine
from unity.plan.plan_family import PlanFamily
from unity.planning.infeasible import shortfall
from unity.planning.ranking import Solution
from unity.planning.request import Request
from unity.search.joint.pricing import Prices
from unity.search.published import Asked, algorithm
from unity.search.substitution.fitting import fitting, leanest
from unity.transforms.transformation import transformed


def in_sequence(request: Request, machine: Machine) -> Solution:
    """Return the best solution of the program that is the fastest on one device (the baseline of Unity, section 6.4)."""
    chosen, interrupted = request.rewriter.best(request.captured, Prices(machine.alone, request.training), request.say)
    transformations = () if chosen is None else (chosen,)
    search = request.search(transformed(request.captured, transformations), Prices(machine, request.training))
    candidate = request.best(search)
    if candidate is None or candidate.memory > request.limit:
        raise InfeasibleError(shortfall(machine, search.leanest, request.limit))
    family = PlanFamily(request.fn, request.captured, search, 0.0, transformations=transformations, interrupted=interrupted)
    return family, candidate


def by_substitution(request: Request, machine: Machine) -> Solution:
    """Return the best solution that parallelizing substitutions reach."""
    search = request.search(request.captured, Prices(machine, request.training))
    budget = request.rewriter.budget
    best = leanest(search, budget) if request.objective == "memory" else fitting(search, request.limit, budget)
    if best.candidate.memory > request.limit:
        if best.interrupted:
            raise KeyboardInterrupt
        raise InfeasibleError(shortfall(machine, best.candidate, request.limit))
    family = PlanFamily(request.fn, request.captured, search, 0.0, (best.candidate,), applications=best.applications)
    return replace(family, interrupted=best.interrupted), best.candidate


def as_published(request: Request, machine: Machine) -> Solution:
    """Return the result of a published algorithm, which minimizes its own objective."""
    search = request.search(request.captured, Prices(machine, request.training))
    candidate = algorithm(request.kind)(search, Asked(request.limit, request.seed, request.budget))
    if candidate.memory > request.limit:
        raise InfeasibleError(shortfall(machine, candidate, request.limit, f"the plan of search={request.kind!r}"))
    return PlanFamily(request.fn, request.captured, search, 0.0, (candidate,)), candidate
