"""Working sets of operators, and limits on them under which a strategy needs no more memory than a given one.

An operator's working set is live only during its turn, beside the residuals of the operators before it. The peak is therefore not a
sum over operators, and the search, which minimizes sums, ignores it; but the working set of each operator can be limited
separately. The first operators, before which there are few residuals, may have large ones, such as a whole embedding table.
"""

from __future__ import annotations

from itertools import accumulate

from unity.search.cost.assembly import Assembled
from unity.search.solver.problem import Point

ROUNDING = 1e-9  # relative error of sums of bytes


def working_set_bytes(assembled: Assembled, point: Point) -> list[float]:
    """Return for every site the bytes of its operands and results on one device."""
    return [float(nbytes[v]) for nbytes, v in zip(assembled.working_sets, point.values, strict=True)]


def working_set_limits(assembled: Assembled, point: Point) -> list[float]:
    """Return for every site the largest working set with which its turn needs no more memory than the peak of this point."""
    residuals = list(accumulate(residual_bytes(assembled, point)))
    peak = max(r + own for r, own in zip(residuals, working_set_bytes(assembled, point), strict=True))
    return [(peak - r) * (1 + ROUNDING) for r in residuals]


def residual_bytes(assembled: Assembled, point: Point) -> list[float]:
    """Return for every site the bytes of its residuals: all memory that the problem counts, except arguments."""
    problem, values = assembled.problem, point.values
    totals = [float(own.memory[a, v]) for own, a, v in zip(problem.unary, point.alternatives.unary, values, strict=True)]
    for edge, a in zip(problem.edges, point.alternatives.edges, strict=True):
        totals[edge.second] += float(edge.cost.memory[a, values[edge.first], values[edge.second]])
    arguments = [site.kind == "input" for site in assembled.opened.sites]
    return [0.0 if argument else nbytes for argument, nbytes in zip(arguments, totals, strict=True)]
