"""The best parallel graph that substitutions find: the fastest that fits a memory limit, or the leanest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from unity.base.interruption import UntilInterrupted
from unity.search.joint.joint import Budget
from unity.search.session import Candidate, Search
from unity.search.substitution.levels import improvements
from unity.search.substitution.space import GraphSpace
from unity.search.substitution.trace import RuleApplication, trace

CANDIDATES = 50_000  # parallel graphs to price if no budget is given
WEIGHTS = (0.25, 1.0, 4.0, 16.0, math.inf)  # prices of the fastest strategy's bytes, as multiples of its seconds


@dataclass(frozen=True, eq=False)
class Substituted:
    """A strategy, and the rules that lead to it from the serial graph."""

    candidate: Candidate
    applications: tuple[RuleApplication, ...]
    interrupted: bool  # whether Ctrl-C ended the search early


def fitting(search: Search, limit: float, budget: Budget) -> Substituted:
    """Return the fastest strategy found under a limit of bytes per device; the leanest if none fits.

    If the limit does not matter, a larger budget never gives a slower strategy.
    """
    fastest = substituted(search, 0.0, budget)
    if fastest.candidate.memory <= limit:
        return fastest
    every = leaner(search, fastest, budget)
    fit = [s for s in every if s.candidate.memory <= limit]
    best = min(fit, key=lambda s: s.candidate.time) if fit else min(every, key=lambda s: s.candidate.memory)
    return replace(best, interrupted=every[-1].interrupted)


def leanest(search: Search, budget: Budget) -> Substituted:
    """Return the strategy found with the least memory."""
    every = leaner(search, substituted(search, 0.0, budget), budget)
    return replace(min(every, key=lambda s: s.candidate.memory), interrupted=every[-1].interrupted)


def leaner(search: Search, fastest: Substituted, budget: Budget) -> list[Substituted]:
    """Return the fastest strategy, and those found when bytes count more and more."""
    search.say("searching for what needs less memory")
    rate = fastest.candidate.time / max(fastest.candidate.memory, 1.0)
    strategies = [fastest]
    for part in WEIGHTS:
        if not strategies[-1].interrupted:
            strategies.append(substituted(search, part * rate, budget))
    return strategies


def substituted(search: Search, weight: float, budget: Budget) -> Substituted:
    """Return the best strategy found for a price of memory. After Ctrl-C it is the best until then."""
    space = GraphSpace.of(search.graph, search.differentiated, search.machine, search.training, weight)
    reached = UntilInterrupted(improvements(space, budget, search.say))
    graphs = list(reached)
    if not graphs:
        raise KeyboardInterrupt
    return Substituted(search.candidate(*space.point(graphs[-1].graph)), trace(space, graphs[-1].steps), reached.interrupted)
