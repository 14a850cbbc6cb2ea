"""The ticks of a step by 2BW after the batch before is done: of that only gradients of samples are on their way home.

With S stages the last backward pass of the batch before is done after S - 1 ticks, by stage 0. So its weights' gradients are whole
then, and are no part of what goes on from tick to tick: what sends them between devices may run at the same time as these ticks.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from unity.exec.pipelines.gpipe import Arrays
from unity.exec.pipelines.half_ticks import Loop, State, Sums


class Homeward(Loop):
    """Ticks of two batches, of which the older one has no passes left."""

    def after(self, state: State, ticks: int) -> State:
        """The rest of a step's ticks, so many of which are over."""
        new, old = state.sums
        left = Sums((), (), old.parts, (), (), old.read)
        state = self.on(state._replace(sums=(new, left)), range(ticks, self.schedule.turns))
        new, left = state.sums
        return state._replace(sums=(new, old._replace(parts=left.parts, read=left.read)))

    @cached_property
    def newest(self) -> Loop:
        """The same, of the new batch alone."""
        return Loop(self.pair, self.batches[:1], self.schedule, self.wanted, self.moving, self.pullback, self.results)

    def work(self, s: State, at: Any) -> tuple[Arrays, State]:
        found, after = self.newest.work(s._replace(sums=s.sums[:1]), at)
        return found, after._replace(sums=(*after.sums, *s.sums[1:]))

    def ended(self, s: State, at: Any, found: Arrays) -> tuple[State, tuple[Arrays, Arrays]]:
        after, gradients = self.newest.ended(s._replace(sums=s.sums[:1]), at, found)
        return after._replace(sums=(*after.sums, *s.sums[1:])), gradients
