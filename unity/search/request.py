"""The request for a transformed program, such as one with a pipeline or with branches: its search, and the plan to beat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unity.pcg.capture.capture import Captured
from unity.search.session import Candidate, Search


@dataclass(frozen=True, eq=False)
class Wish:
    """The functions that search and compare transformed programs, and the plan that one of them should beat.

    Args:
        search: Returns the search of a program.
        choose: Returns the best strategy of a search; None if none is acceptable.
        worth: Returns a strategy's objective, to be minimized in lexicographic order.
        than: The search and the strategy to beat; None if any strategy is good enough.
        say: Receives a line of progress.
    """

    search: Callable[[Captured], Search]
    choose: Callable[[Search], Candidate | None]
    worth: Callable[[Candidate], tuple[float, float]]
    than: tuple[Search, Candidate] | None = None
    say: Callable[[str], None] = lambda stage: None

    def figure(self, candidate: Candidate) -> float:
        """Return the first figure of a strategy's objective: its seconds, or the bytes that it needs."""
        return self.worth(candidate)[0]
