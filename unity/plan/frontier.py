"""The Pareto frontier of a step's time and memory, each point of it a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from unity.plan.plan_family import PlanFamily
from unity.search.session import Candidate

if TYPE_CHECKING:
    from unity.plan.plan import Plan


class Frontier(Sequence["Plan"]):
    """The plans that no other plan beats in both time and memory, fastest first.

    Attributes:
        exact: whether these are all such plans.
    """

    def __init__(self, family: PlanFamily, chosen: Candidate, plan: Callable[[Candidate], Plan]) -> None:
        self._family, self._chosen, self._plan = family, chosen, plan
        self._candidates, self.exact = family.frontier

    def __len__(self) -> int:
        return len(self._candidates)

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> list[Plan]: ...
    def __getitem__(self, index: int | slice) -> Plan | list[Plan]:
        if isinstance(index, slice):
            return [self._plan(c) for c in self._candidates[index]]
        if not -len(self) <= index < len(self):
            raise IndexError(f"the frontier has {len(self)} points, there is no point {index} (docs: plan#the-frontier)")
        return self._plan(self._candidates[index])

    def __iter__(self) -> Iterator[Plan]:
        return (self[k] for k in range(len(self)))

    def __str__(self) -> str:
        from unity.explain.tables import frontier_table, rendered

        return rendered(frontier_table(self._candidates, self._chosen, self.exact))

    __repr__ = __str__

    def plot(self, path: str | Path | None = None) -> Any:
        """Return the frontier as a matplotlib figure (the extra `plot`), and write it to `path` if one is passed."""
        from unity.explain.tables import frontier_plot

        return frontier_plot(self._candidates, self._chosen, self._family.search.machine.name, path)
