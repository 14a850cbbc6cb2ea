"""Plans of nearly the same predicted time, told apart: simulated first, and the best of those run on the devices that are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from unity.exec.measure.trial import relative
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily, Tried
from unity.plan.step import can_run, step_of
from unity.search.session import Candidate

NEAR = 1.15  # times the fastest's predicted seconds that another may take
SIMULATED, RUN = 16, 4  # plans, at most
CLEARLY = 0.98  # of the predicted best's seconds: what another must stay below to take its place


@dataclass(frozen=True)
class Ranking:
    """What was chosen, and everything that was looked at, best first."""

    chosen: Candidate
    tried: tuple[Tried, ...]


def measured(made: PlanFamily, best: Candidate, limit: float, say: Callable[[str], None]) -> Ranking:
    """The fastest plan as it runs, of the frontier's points near `best` that fit the limit.

    They are simulated (what overlaps, the sum of all terms does not see), and the best of those are run in turns, always `best`
    among them, if the devices can run it. A step that is not clearly shorter does not take its place: two runs of one program
    differ as much.
    """
    say("simulating what is nearly as fast")
    near = [c for c in made.frontier[0] if c.memory <= limit and c.time <= NEAR * best.time and c is not best]
    plans = [Plan(made, c) for c in (best, *near[: SIMULATED - 1])]
    found = [Tried(p.time, p.memory, p.simulate().makespan) for p in plans]
    order = sorted(range(1, len(plans)), key=lambda k: found[k].simulated)
    chosen = [k for k in (0, *order) if can_run(plans[k])][:RUN]
    if not chosen:
        return Ranking(best, tuple(found[k] for k in (0, *order)))
    say(f"running {len(chosen)} plans")
    steps = [step_of(plans[k], made.search.training) for k in chosen]
    times = dict(zip(chosen, relative(steps), strict=True))
    fastest = min(chosen, key=times.__getitem__)
    winner = fastest if times[fastest] < CLEARLY * times[chosen[0]] else chosen[0]
    ranks = dict.fromkeys((winner, *chosen, 0, *order))
    return Ranking(plans[winner].candidate, tuple(replace(found[k], measured=times.get(k)) for k in ranks))
