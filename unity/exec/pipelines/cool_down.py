"""The ticks of a 2BW step after the last backward pass of the batch before.

With S stages that pass is over after S - 1 ticks, on stage 0; only gradients of samples are still in flight. The weights' gradients
of that batch are complete, so these ticks do not carry them, and their collectives may overlap with them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from unity.exec.pipelines.gpipe import Arrays
from unity.exec.pipelines.half_ticks import HalfTickLoop, LoopState, Sums


class Homeward(HalfTickLoop):
    """Ticks with two batches in flight, of which the older one has no passes left."""

    def after(self, state: LoopState, ticks: int) -> LoopState:
        """Run the rest of a step's ticks, of which the first `ticks` are over."""
        new, old = state.sums
        left = Sums((), (), old.parts, (), (), old.read)
        state = self.on(state._replace(sums=(new, left)), range(ticks, self.schedule.turns))
        new, left = state.sums
        return state._replace(sums=(new, old._replace(parts=left.parts, read=left.read)))

    @cached_property
    def newest(self) -> HalfTickLoop:
        """The loop of the new batch alone."""
        return HalfTickLoop(self.pair, self.batches[:1], self.schedule, self.wanted, self.moving, self.pullback, self.results)

    def work(self, s: LoopState, at: Any) -> tuple[Arrays, LoopState]:
        results, after = self.newest.work(s._replace(sums=s.sums[:1]), at)
        return results, after._replace(sums=(*after.sums, *s.sums[1:]))

    def ended(self, s: LoopState, at: Any, results: Arrays) -> tuple[LoopState, tuple[Arrays, Arrays]]:
        after, gradients = self.newest.ended(s._replace(sums=s.sums[:1]), at, results)
        return after._replace(sums=(*after.sums, *s.sums[1:])), gradients
