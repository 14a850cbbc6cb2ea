"""TensorOpt (Cai et al. 2020): the frontier of time and memory by frontier tracking, and its three options (section 4.1).

- `space` has its strategies, `frontiers` and `tracking` its algorithm.
- `configurations` selects promising configurations, so that tracking takes only seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from unity.base.errors import InfeasibleError
from unity.baselines.restricted import RestrictedSpace, Structure
from unity.baselines.tensoropt.configurations import promising
from unity.baselines.tensoropt.space import space
from unity.baselines.tensoropt.tracking import LAST, MOST, Tracked, Way, track
from unity.search.published import Asked
from unity.search.session import Candidate, Search
from unity.search.solver.problem import Point

CLOSE = 2  # configurations of an operator besides those of the hull, for each of some weights

__all__ = ["TensorOpt", "mini_parallelism", "mini_time", "profiling"]


@dataclass(frozen=True, eq=False)
class TensorOpt:
    """Frontier tracking of one search's graph on its machine.

    Args:
        search: the search.
        way: the variant of the algorithm (see `tracking`).
        most: the most tuples per frontier while operators are eliminated; None for all.
        cumulative: the most tuples per frontier along the row; None for all.
        close: how many configurations close to the hull an operator has besides those of the hull (see `configurations`);
            None for all.
    """

    search: Search
    way: Way = "ldp"
    most: int | None = MOST
    cumulative: int | None = LAST
    close: int | None = CLOSE

    @cached_property
    def space(self) -> RestrictedSpace:
        return space(Structure(self.search))

    @cached_property
    def tracked(self) -> Tracked:
        """The cost frontier."""
        sites = self.space.assembled.opened.sites
        data = [s for s, site in enumerate(sites) if site.kind == "input" and not site.weight]
        first = next((u for u, site in enumerate(sites) if any(p.source == data[0] for p in site.ports)), 0) if data else 0
        if self.close is None:
            return track(self.space.problem, first, way=self.way, most=self.most, cumulative=self.cumulative)
        some = promising(self.space, self.close)
        result = track(some.problem, first, way=self.way, most=self.most, cumulative=self.cumulative)
        return replace(result, points=some.strategy(result.points))

    def candidate(self, point: Point) -> Candidate:
        """Return a point of the frontier as a strategy."""
        return self.search.candidate(self.space.assembled, point)

    @cached_property
    def frontier(self) -> tuple[Candidate, ...]:
        """All strategies of the frontier, fastest first, with their predicted memory."""
        return tuple(self.candidate(point) for point in self.tracked.points)

    def fastest_under(self, limit: float) -> Candidate:
        """Return the fastest strategy of the frontier that fits; the leanest if none does.

        Memory falls along the frontier, so binary search finds the strategy. Peak memory need not fall, though; if binary search
        finds nothing, all others whose sums fit are tried, the leanest first.

        Raises:
            InfeasibleError: no strategy is possible at all.
        """
        every = self.tracked.points
        if not every:
            raise InfeasibleError(f"TensorOpt: no strategy of its kind is possible for this graph on {self.search.machine.name}")
        best, start, end = self.candidate(every[-1]), 0, len(every) - 1
        while start < end:
            middle = (start + end) // 2
            candidate = self.candidate(every[middle])
            best, start, end = (candidate, start, middle) if candidate.memory <= limit else (best, middle + 1, end)
        if best.memory <= limit:
            return best
        others = (self.candidate(point) for point in reversed(every[:-1]) if point.memory <= limit)
        return next((candidate for candidate in others if candidate.memory <= limit), best)


def mini_time(search: Search, asked: Asked) -> Candidate:
    """Return the fastest strategy under the memory limit (the option *mini-time*)."""
    return TensorOpt(search).fastest_under(asked.limit)


def profiling(searches: Iterable[Search], limit: float) -> tuple[tuple[int, Candidate], ...]:
    """Return the fastest strategy on each number of devices (the option *profiling*).

    `searches` are of the same graph on machines of several sizes. If a strategy exceeds the limit, none of its machine fits.
    """
    return tuple((search.machine.devices, TensorOpt(search).fastest_under(limit)) for search in searches)


def mini_parallelism(searches: Iterable[Search], limit: float) -> tuple[Search, Candidate] | None:
    """Return the fastest strategy on the fewest devices on which one fits (the option *mini-parallelism*); None if it fits on none.

    `searches` are of the same graph on machines of several sizes, the smallest first.
    """
    for search in searches:
        candidate = TensorOpt(search).fastest_under(limit)
        if candidate.memory <= limit:
            return search, candidate
    return None
