"""Constraints that leave no plan: which of them are to blame."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf

from unity.base.errors import InfeasibleError
from unity.base.formatting import short, size
from unity.constraints.bound import Bound
from unity.constraints.kinds import Constraint, Marked, OperatorPin, Pin
from unity.constraints.paths import matching
from unity.pcg.parallel.wanted_types import degree
from unity.search.session import Search
from unity.search.space.masks import names_of


def possible(search: Search) -> bool:
    """Whether there is any strategy, whatever it needs."""
    try:
        return bool(search.minimizer.at([0.0]))
    except InfeasibleError:
        return False


def smallest(constraints: Sequence[Constraint], feasible: Callable[[Sequence[Constraint]], bool]) -> list[Constraint]:
    """Of constraints that are not feasible together, some that are not either, but would be without any one (a deletion filter)."""
    kept = list(constraints)
    for one in constraints:
        rest = [c for c in kept if c is not one]
        if not feasible(rest):
            kept = rest
    return kept


def conflict(bound: Bound, search: Search, limit: float = inf) -> str | None:
    """Why constraints leave no plan that fits a limit: the smallest set that does, in words. None: there is none without them."""

    def without_limit(some: Sequence[Constraint]) -> bool:
        return possible(replace(search, restrict=bound.of(some)))

    def fits(some: Sequence[Constraint]) -> bool:
        return replace(search, restrict=bound.of(some)).leanest.memory <= limit

    if not bound.every:
        return None
    apart = not possible(search)
    feasible = without_limit if apart else fits
    if not feasible([]):
        return None
    found = smallest(bound.every, feasible)
    alone = len(found) == 1
    lines = "".join(f"\n    {c}{_note(c, bound, search) if apart and alone else ''}" for c in found)
    what = "this constraint leaves" if alone else "these constraints together leave"
    where = "" if apart else f" that fits {size(limit)}"
    hint = "Change it" if alone else "Without any one of them there is one"
    return f"infeasible: on {search.machine.name} {what} no plan{where}:{lines}\n    {hint}. (docs: constraints#conflicts)"


def _note(constraint: Constraint, bound: Bound, search: Search) -> str:
    """What does not divide, if that is all that is wrong."""
    axes, names = search.machine.axes, names_of(search.machine)
    if not isinstance(constraint, (Pin, OperatorPin, Marked)):
        return ""
    for name, shape in _shapes(constraint, bound, search):
        for dim, want in enumerate(constraint.wanted.slices(len(shape), names)):
            n = degree(want, axes)
            if shape[dim] % n:
                near = f"the nearest that is: {-(-shape[dim] // n) * n}"
                return f"\n        {name}: dimension {dim} of size {shape[dim]} is not divisible by {n} ({near})"
            if isinstance(want, int) and n not in _degrees([a.size for a in axes]):
                return f"\n        {name}: no axes of this machine make {n} slices: they are of sizes {[a.size for a in axes]}"
    return ""


def _degrees(sizes: Sequence[int]) -> set[int]:
    """The numbers of slices that axes of these sizes can make."""
    found = {1}
    for n in sizes:
        found |= {n * m for m in found}
    return found


def _shapes(constraint: Pin | OperatorPin | Marked, bound: Bound, search: Search) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(constraint, Pin):
        for k in matching(constraint.path, bound.paths):
            yield bound.paths[k][0], search.graph.inputs[k].tensors[0].shape
    elif isinstance(constraint, OperatorPin):
        for node, _ in search.graph.walk():
            if constraint.means(node):
                yield f"{node.kind} at {short(node.source)}", node.tensors[0].shape
    else:
        for node, _ in search.graph.walk():
            if node.kind == "constrain":
                yield "the value", node.tensors[0].shape
