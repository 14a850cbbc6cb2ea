"""Contributions of values to partial sums that they were computed from, which the search rules out.

A whole value may be added to a partial sum: one device contributes it. If it was computed from that sum, the two may be meant to
cancel, as in `x - max(x)`, whose largest element is exactly 0 and whose exponential is at most 1. A device that has only a summand
of `x` subtracts from that instead, and rounds. What remains is of the size of this rounding, and its exponential may overflow.
No plan needs such a contribution, since the sum was added up to compute the value. `propagation.cancels` rules it out inside of an
operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, reduce
from operator import or_

from unity.pcg.propagation.choices import choices_with_moves
from unity.pcg.types.parallel_type import PARTIAL
from unity.search.space.sites import Site


def refuse_cancelling_contributions(sites: Sequence[Site]) -> None:
    """Mark the ports at which a whole value must not become a part of a sum, and the operands that each was computed from."""
    above, linear = _ancestors(sites), cache(lambda s: _linear_operands(sites[s]))
    for s, site in enumerate(sites):
        floating = [p for p, port in enumerate(site.ports) if port.tensor.floating]
        if site.kind != "operator" or len(floating) < 2 or site.is_product:
            continue
        sums = {q: _summands(sites, s, q, linear) for q in floating}
        for p in floating:
            operands = tuple(q for q in floating if q != p and above[site.ports[p].source] & sums[q])
            if operands:
                site.ports[p] = replace(site.ports[p], derived=operands)
                every = reduce(or_, (sums[q] for q in operands))
                for user, position in _linear_path(sites, s, p, linear):
                    port = sites[user].ports[position]
                    if above[port.source] & every:
                        sites[user].ports[position] = replace(port, contributes=False)


def _ancestors(sites: Sequence[Site]) -> list[int]:
    """Return for every site the set of sites that it is computed from, and of itself, as bits; loops' later steps aside."""
    above: list[int] = []
    for s, site in enumerate(sites):
        bits = 1 << s
        for port in site.ports:
            bits |= above[port.source] if port.source < s else 0
        above.append(bits)
    return above


def _summands(sites: Sequence[Site], s: int, p: int, linear: Callable[[int], Sequence[int]]) -> int:
    """Return the sites whose partial sums an operand of a site may be a linear function of, as bits."""
    sources = {sites[user].ports[position].source for user, position in _linear_path(sites, s, p, linear)}
    return sum(1 << v for v in sources if v < s and sites[v].kind != "input")


def _linear_path(sites: Sequence[Site], s: int, p: int, linear: Callable[[int], Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield an operand, as (site, position), and those of its producers of whose partial sums it is a linear function.

    The path ends at products, and at operators whose results are partial sums only of other values: a plan may add the logarithm of
    a sum of exponentials to the elements that each device has of the labels. It passes sums of elements, whose operand may be a
    partial sum.

    Args:
        sites: all sites.
        s: the site.
        p: the position of the operand.
        linear: returns the operands of a site, by number, that may be partial sums where its results are.
    """
    pending, visited = [(s, p)], set[int]()
    while pending:
        user, position = pending.pop()
        yield user, position
        producer = sites[user].ports[position].source
        if producer < user and producer not in visited:
            visited.add(producer)
            pending += [(producer, j) for j in linear(producer)]


def _linear_operands(site: Site) -> list[int]:
    """Return the operands of a site that may be partial sums where its results are."""
    if site.kind == "free":
        return [0] if len(site.ports) == 1 else []
    if site.body is None or site.is_product:
        return []
    summed = (c.operands for c in choices_with_moves(site.body) if PARTIAL in c.results)
    return sorted({p for operands in summed for p, s in enumerate(operands) if s == PARTIAL})
