"""The best parallel graph that substitutions find: the fastest that fits a memory limit, or the leanest."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

from unity.search.joint import Budget
from unity.search.session import Candidate, Search
from unity.search.unity_rules.levels import Reached, improvements
from unity.search.unity_rules.space import Space
from unity.search.unity_rules.trace import Application, trace

CANDIDATES = 50_000  # parallel graphs that are priced, where no budget is given
WEIGHTS = (0.25, 1.0, 4.0, 16.0, math.inf)  # what the fastest's bytes count where they are too many, of its seconds


@dataclass(frozen=True, eq=False)
class Substituted:
    """A strategy, and the rules that lead to it from the serial graph."""

    candidate: Candidate
    applications: tuple[Application, ...]


def fitting(search: Search, limit: float, budget: Budget) -> Substituted:
    """The fastest that is found under a limit of bytes on a device; the leanest if none fits.

    Without a limit that matters, a larger budget never gives a slower one.
    """
    found = substituted(search, 0.0, budget)
    if found.candidate.memory <= limit:
        return found
    every = leaner(search, found, budget)
    fit = [s for s in every if s.candidate.memory <= limit]
    return min(fit, key=lambda s: s.candidate.time) if fit else min(every, key=lambda s: s.candidate.memory)


def leanest(search: Search, budget: Budget) -> Substituted:
    """The least memory that is found."""
    return min(leaner(search, substituted(search, 0.0, budget), budget), key=lambda s: s.candidate.memory)


def leaner(search: Search, fastest: Substituted, budget: Budget) -> list[Substituted]:
    """The fastest, and what is found where bytes count more and more."""
    search.say("searching for what needs less memory")
    rate = fastest.candidate.time / max(fastest.candidate.memory, 1.0)
    return [fastest, *(substituted(search, part * rate, budget) for part in WEIGHTS)]


def substituted(search: Search, weight: float, budget: Budget) -> Substituted:
    """The best that is found where bytes count for something. Of what was found until Ctrl-C, too."""
    space = Space.of(search.graph, search.differentiated, search.machine, search.training, weight)
    reached: list[Reached] = []
    with contextlib.suppress(KeyboardInterrupt):
        for better in improvements(space, budget, search.say):
            reached.append(better)
    best = reached[-1]
    return Substituted(search.candidate(*space.point(best.graph)), trace(space, best.steps))
