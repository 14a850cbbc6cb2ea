"""What operators may need at once for a strategy to need no more memory than another.

What an operator works on is there for a moment, beside what those before it keep: no sum, so minimizing sums does not see it. But
it can be limited, for every operator by itself. The first ones, before which little is kept, may work on much: a whole table, say.
"""

from __future__ import annotations

from itertools import accumulate

from unity.search.cost.assembly import Assembled
from unity.search.solver.problem import Point

ROUNDING = 1e-9  # of sums of bytes


def at_once(assembled: Assembled, point: Point) -> list[float]:
    """For every site, the bytes of operands and results that it has on one device."""
    return [float(ends[v]) for ends, v in zip(assembled.ends, point.values, strict=True)]


def room(assembled: Assembled, point: Point) -> list[float]:
    """For every site, how much it may have at once for no more to be held at its turn than is at some operator's of this point."""
    before = list(accumulate(kept(assembled, point)))
    most = max(b + own for b, own in zip(before, at_once(assembled, point), strict=True))
    return [(most - b) * (1 + ROUNDING) for b in before]


def kept(assembled: Assembled, point: Point) -> list[float]:
    """For every site, the bytes that are kept for it: all that the search counts, but for arguments."""
    problem, values = assembled.problem, point.values
    found = [float(own.memory[a, v]) for own, a, v in zip(problem.unary, point.alternatives.unary, values, strict=True)]
    for edge, a in zip(problem.edges, point.alternatives.edges, strict=True):
        found[edge.second] += float(edge.cost.memory[a, values[edge.first], values[edge.second]])
    arguments = [site.kind == "input" for site in assembled.opened.sites]
    return [0.0 if argument else nbytes for argument, nbytes in zip(arguments, found, strict=True)]
