"""Choice between plans of nearly equal predicted time: by simulation, and by running the best of them on this process's devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from unity.exec.measure.trial import relative
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily, Tried
from unity.plan.step import can_run, step_of
from unity.search.overlap import overlapping
from unity.search.session import Candidate

Solution: TypeAlias = tuple[PlanFamily, Candidate]  # the arguments of a Plan: its family, and its point of the frontier

NEAR = 1.15  # times the best predicted seconds: slower plans are not simulated
SIMULATED, RUN = 16, 4  # plans, at most
CLEARLY = 0.98  # times the measured seconds of the predicted best: a plan must be faster than this to replace it


def fastest_simulated(best: Solution, others: Iterable[Solution], limit: float) -> Solution:
    """Return the solution with the shortest simulated step; of equal ones, that with the least sum.

    Args:
        best: the solution with the least sum of operators and collectives.
        others: solutions, also of other programs. Those whose sum is much larger are left out.
        limit: bytes on one device.
    """
    programs = {id(family): (family, c) for family, c in others if c.time <= NEAR * best[1].time} | {id(best[0]): best}
    simulated = [(family, s) for family, c in programs.values() for s in overlapping(family.search, c, limit)]
    family, first = min(simulated, key=lambda pair: (pair[1].seconds, pair[1].candidate.time, pair[1].candidate.memory))
    return family, replace(first.candidate, simulated=first.seconds)


@dataclass(frozen=True)
class Ranking:
    """The chosen point of the frontier, and the figures of all plans that it was chosen from, best first."""

    chosen: Candidate
    tried: tuple[Tried, ...]


def measured(family: PlanFamily, best: Candidate, limit: float, say: Callable[[str], None]) -> Ranking:
    """Return the plan that runs fastest, of the frontier's points near `best` that fit the limit.

    They are simulated first, because the cost model's sum of all terms does not see what overlaps. The best of them are run in
    turns, `best` always among them if the devices can run it. The gradients are measured; the predicted time of moving the
    optimizer's state is added. A plan that is not clearly faster does not replace `best`: two runs
    of one program differ as much.
    """
    say("simulating what is nearly as fast")
    near = [c for c in family.frontier[0] if c.memory <= limit and c.time <= NEAR * best.time and c is not best]
    plans = [Plan(family, c) for c in (best, *near[: SIMULATED - 1])]
    tried = [Tried(p.time, p.memory, p.inspect.simulate().makespan) for p in plans]
    order = sorted(range(1, len(plans)), key=lambda k: tried[k].simulated)
    runnable = [k for k in (0, *order) if can_run(plans[k])][:RUN]
    if not runnable:
        return Ranking(best, tuple(tried[k] for k in (0, *order)))
    say(f"running {len(runnable)} plans")
    steps = [step_of(plans[k], family.search.training) for k in runnable]
    times = {k: time + plans[k].program.prediction.updating for k, time in zip(runnable, relative(steps), strict=True)}
    fastest = min(runnable, key=times.__getitem__)
    winner = fastest if times[fastest] < CLEARLY * times[runnable[0]] else runnable[0]
    ranks = dict.fromkeys((winner, *runnable, 0, *order))
    return Ranking(plans[winner].program.candidate, tuple(replace(tried[k], measured=times.get(k)) for k in ranks))
