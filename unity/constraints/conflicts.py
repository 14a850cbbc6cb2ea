"""Diagnosis of infeasible constraints: the smallest conflicting set, and for a single constraint the size that does not divide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf

from unity.base.errors import InfeasibleError
from unity.base.formatting import short, size
from unity.constraints.bound_constraints import BoundConstraints
from unity.constraints.kinds import SHARDED, Constraint, Marked, OperatorPin, Pin, marked_by
from unity.constraints.paths import matching
from unity.pcg.ir.graph import CONSTRAIN
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.parallel.sharding_spec import degree
from unity.search.session import Search
from unity.search.space.masks import names_of


def possible(search: Search) -> bool:
    """Return whether a search has any strategy, however much memory it needs."""
    try:
        return bool(search.minimizer.at([0.0]))
    except InfeasibleError:
        return False


def smallest(constraints: Sequence[Constraint], feasible: Callable[[Sequence[Constraint]], bool]) -> list[Constraint]:
    """Return an irreducible infeasible subset of constraints that are infeasible together, by a deletion filter.

    The subset becomes feasible if any one of its constraints is dropped.
    """
    subset = list(constraints)
    for constraint in constraints:
        rest = [c for c in subset if c is not constraint]
        if not feasible(rest):
            subset = rest
    return subset


def conflict(
    bound: BoundConstraints,
    search: Search,
    has_plan: Callable[[Sequence[Constraint]], bool],
    limit: float = inf,
    required: str = "",
) -> str | None:
    """Return the message about the smallest set of constraints that leaves no plan that fits a limit.

    Returns None if no plan fits without constraints either.

    Args:
        bound: all constraints.
        search: the search of the captured function.
        has_plan: tells whether any program that the options allow has a plan that fits and obeys some of the constraints.
        limit: the memory limit, infinite if there is no plan at any.
        required: the options that the plan must have, as text.
    """

    def without_limit(some: Sequence[Constraint]) -> bool:
        return possible(replace(search, restrict=bound.of(some)))

    is_excluded = not possible(search)
    feasible = without_limit if is_excluded else has_plan
    if not feasible([]):
        return None
    conflicting = smallest(bound.every, feasible)
    is_single = len(conflicting) == 1
    names = AxisNames.of_every_axis(search.machine.axes, search.machine.named_levels)
    notes = [_note(c, bound, search) if is_excluded and is_single else "" for c in conflicting]
    lines = "".join(f"\n    {c.described(names)}{note}" for c, note in zip(conflicting, notes, strict=True))
    subject = "this constraint leaves" if is_single else "these constraints together leave"
    where = f" with {required}" if required and not is_excluded else ""
    where += f" that fits {size(limit)}" if limit < inf and not is_excluded else ""
    hint = "Change it" if is_single else "Without any one of them there is one"
    return f"infeasible: on {search.machine.name} {subject} no plan{where}:{lines}\n    {hint}. (docs: constraints#conflicts)"


def _note(constraint: Constraint, bound: BoundConstraints, search: Search) -> str:
    """Return a line about the first dimension that a sharding does not divide, or that the machine's axes cannot; else ""."""
    axes, names = search.machine.axes, names_of(search.machine)
    if not isinstance(constraint, SHARDED):
        return ""
    for name, shape in _shapes(constraint, bound, search):
        for dim, slicing in enumerate(constraint.sharding.slices(len(shape), names)):
            n = degree(slicing, axes)
            if shape[dim] % n:
                near = f"the nearest that is: {-(-shape[dim] // n) * n}"
                return f"\n        {name}: dimension {dim} of size {shape[dim]} is not divisible by {n} ({near})"
            if isinstance(slicing, int) and n not in _degrees([a.size for a in axes]):
                return f"\n        {name}: no axes of this machine make {n} slices: they are of sizes {[a.size for a in axes]}"
    return ""


def _degrees(sizes: Sequence[int]) -> set[int]:
    """Return the numbers of slices that subsets of axes of these sizes can make."""
    degrees = {1}
    for n in sizes:
        degrees |= {n * m for m in degrees}
    return degrees


def _shapes(
    constraint: Pin | OperatorPin | Marked, bound: BoundConstraints, search: Search
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors that a constraint shards, each as a name and a shape."""
    if isinstance(constraint, Pin):
        for k in matching(constraint.path, bound.paths):
            yield bound.paths[k][0], search.graph.inputs[k].tensors[0].shape
    elif isinstance(constraint, OperatorPin):
        for node, _ in search.graph.walk():
            if constraint.means(node):
                yield from ((f"{node.kind} at {short(node.source)}", tensor.shape) for tensor in node.tensors)
    else:
        for node, _ in search.graph.walk():
            if node.kind == CONSTRAIN and marked_by(node) == constraint:
                yield "the value", node.tensors[0].shape
