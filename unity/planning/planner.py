"""The plan of a request for one machine: from the cache, or by the request's search."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from unity.base.errors import ConstraintError, InfeasibleError
from unity.base.processes import same
from unity.base.user_warnings import recorded_warnings, repeat
from unity.machine.machine import Machine
from unity.plan.files import cache
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.planning.joint_search import joint_solution
from unity.planning.options import CONSTRAINED
from unity.planning.other_searches import as_published, by_substitution, in_sequence
from unity.planning.ranking import Solution, measured
from unity.planning.request import Request
from unity.planning.sub_machines import sub_machines
from unity.search.session import Candidate


def plan_on(request: Request, machine: Machine) -> Plan:
    """Return the plan for one machine, from the cache if the same request was planned before."""
    started = time.perf_counter()
    path = cache.entry(request.captured, machine, request.training, _settings(request))
    request.say("looking in the cache")
    cached = cache.recall(path, request.captured, request.fn, lambda: request.rewriter.library)
    # Several processes must measure together, or not at all: unless all of them have the same entry, all of them search.
    if request.local and not same("" if cached is None else Plan(*cached[:2]).program.pcg.key):
        cached = None
    if cached is not None:
        family, candidate, issued = cached
        repeat(issued)
        return Plan(_timed(request, family, started), candidate)
    with recorded_warnings() as issued:
        family, candidate = _searched(request, machine)
    family = replace(_timed(request, family, started), limit=request.limit)
    if family.interrupted:
        request.say("interrupted: this is the best so far, and the next call searches again")
    else:
        cache.keep(path, family, candidate, issued)
    return Plan(family, candidate)


def plan_on_fewest(request: Request, machine: Machine) -> Plan:
    """Return the fastest plan on the fewest devices that fit one (TensorOpt's mini-parallelism)."""
    *parts, whole = sub_machines(machine)
    for part in parts:
        request.say(f"trying {part.devices} devices")
        try:
            return plan_on(replace(request, names_conflicts=False), part)
        except (InfeasibleError, ConstraintError):  # a part may lack an axis that a constraint names
            continue
    return plan_on(request, whole)


def _timed(request: Request, family: PlanFamily, started: float) -> PlanFamily:
    """Return the family of a plan with the seconds since its start, and whether another `overlap` may lead to another plan."""
    may_overlap = request.kind in CONSTRAINED and request.objective != "memory" and not request.overlap
    return replace(family, seconds=time.perf_counter() - started, may_overlap=may_overlap)


def _settings(request: Request) -> dict[str, Any]:
    """Return all that a plan depends on besides the function, the machine and the training, as JSON data."""
    settings = {
        "objective": request.objective,
        "limit": request.limit,
        "seed": request.seed,
        "search": request.kind,
        "steps": request.budget,
    }
    settings |= {"here": request.local, "overlap": request.overlap, "measure": request.measure, "constraints": request.bound.record}
    settings |= asdict(request.transforms)
    return settings | request.rewriter.settings


def _searched(request: Request, machine: Machine) -> Solution:
    """Return the solution that the request's search prefers, or the one that runs fastest if plans are to be measured."""
    if request.kind in CONSTRAINED:
        family, candidate = joint_solution(request, machine)
    else:
        others = {"sequential": in_sequence, "unity-rules": by_substitution}
        family, candidate = others.get(request.kind, as_published)(request, machine)
    return _fastest_run(request, family, candidate) if request.measure and not family.interrupted else (family, candidate)


def _fastest_run(request: Request, family: PlanFamily, candidate: Candidate) -> Solution:
    """Return the point that runs fastest, of those near a candidate. Ctrl-C leaves the candidate."""
    try:
        ranking = measured(family, candidate, request.limit, request.say)
    except KeyboardInterrupt:
        return replace(family, interrupted=True), candidate
    return replace(family, tried=ranking.tried), ranking.chosen
