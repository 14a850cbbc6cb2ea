"""A change, entered and followed by one compiled loop: a search calls it thousands of times, and a call takes as long as a loop."""

from __future__ import annotations

from functools import partial

import numpy as np

from unity.base.compiled_loops import compiled
from unity.search.simulator.columns import Columns
from unity.search.simulator.entry import ENTERED, FREE, FULL, USED, Register, Was, entered, was_of
from unity.search.simulator.loop import NONE, Line, Table, Times, follow
from unity.search.simulator.ticks import added_exactly


def _copied(times: Times, to: Times) -> None:
    """Writes times over others."""
    (ready, level, end), (to_ready, to_level, to_end) = times, to
    to_ready[:], to_level[:], to_end[:] = ready, level, end


@partial(compiled, parts=(added_exactly, entered, follow, was_of, _copied))
def advanced(
    c: Columns, exact: bool, total: float, r: Register, t: Table, times: Times, spare: Times, line: Line
) -> tuple[int, int, Was, float, bool, int]:
    """Enters a change, and simulates what follows.

    Args:
        c: the change.
        exact, total: whether times are added without rounding, and the seconds of all tasks.
        r, t, line: what there is (`entry`, `loop`).
        times: when tasks run. Not written to.
        spare: takes when tasks run after the change.

    Gives what `entered` says, and where; FULL where there is no room: then nothing is entered. What the table said before; `total`
    and `exact` after the change; and how many tasks were simulated, NONE if some can never be taken.
    """
    if len(c.name) > r.sizes[FREE] or r.sizes[USED] + len(c.before) > len(t.before):
        return FULL, NONE, was_of(np.empty(0, np.int64), t), total, exact, NONE
    said, place, was, more, whole = entered(c, r, t)
    if said != ENTERED:
        return said, place, was, total + more, exact, NONE
    _copied(times, spare)
    exact = exact and whole and added_exactly(total + more)
    return said, place, was, total + more, exact, follow(exact, was.rows, t, spare, line)
