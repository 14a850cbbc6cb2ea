"""The best parallel graph that substitutions find: the fastest that fits a memory limit, or the leanest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from unity.base.interruption import UntilInterrupted
from unity.search.joint.joint import Budget
from unity.search.session import Candidate, Search
from unity.search.substitution.levels import improvements
from unity.search.substitution.space import Space
from unity.search.substitution.trace import Application, trace

CANDIDATES = 50_000  # parallel graphs that are priced, where no budget is given
WEIGHTS = (0.25, 1.0, 4.0, 16.0, math.inf)  # what the fastest's bytes count where they are too many, of its seconds


@dataclass(frozen=True, eq=False)
class Substituted:
    """A strategy, and the rules that lead to it from the serial graph."""

    candidate: Candidate
    applications: tuple[Application, ...]
    interrupted: bool  # by Ctrl-C, before all was looked at


def fitting(search: Search, limit: float, budget: Budget) -> Substituted:
    """The fastest that is found under a limit of bytes on a device; the leanest if none fits.

    Without a limit that matters, a larger budget never gives a slower one.
    """
    found = substituted(search, 0.0, budget)
    if found.candidate.memory <= limit:
        return found
    every = leaner(search, found, budget)
    fit = [s for s in every if s.candidate.memory <= limit]
    best = min(fit, key=lambda s: s.candidate.time) if fit else min(every, key=lambda s: s.candidate.memory)
    return replace(best, interrupted=every[-1].interrupted)


def leanest(search: Search, budget: Budget) -> Substituted:
    """The least memory that is found."""
    every = leaner(search, substituted(search, 0.0, budget), budget)
    return replace(min(every, key=lambda s: s.candidate.memory), interrupted=every[-1].interrupted)


def leaner(search: Search, fastest: Substituted, budget: Budget) -> list[Substituted]:
    """The fastest, and what is found where bytes count more and more."""
    search.say("searching for what needs less memory")
    rate = fastest.candidate.time / max(fastest.candidate.memory, 1.0)
    found = [fastest]
    for part in WEIGHTS:
        if not found[-1].interrupted:
            found.append(substituted(search, part * rate, budget))
    return found


def substituted(search: Search, weight: float, budget: Budget) -> Substituted:
    """The best that is found where bytes count for something. Of what was found until Ctrl-C, too."""
    space = Space.of(search.graph, search.differentiated, search.machine, search.training, weight)
    reached = UntilInterrupted(improvements(space, budget, search.say))
    found = list(reached)
    if not found:
        raise KeyboardInterrupt
    return Substituted(search.candidate(*space.point(found[-1].graph)), trace(space, found[-1].steps), reached.interrupted)
