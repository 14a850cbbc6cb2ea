"""What a plan is called with, held against what it was planned for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from unity.pcg.capture import Captured
from unity.pcg.errors import PlanError
from unity.pcg.packed import Packing

SHOWN = 5  # arguments that an error names


def checked(name: str, captured: Captured, packing: Packing, args: tuple[Any, ...]) -> list[Any]:
    """The leaves of a call's arguments, weights packed as the plan has them. `name`: of the function.

    Raises PlanError if their structure, a shape or a type is not what `captured` has.
    """
    leaves, tree = jax.tree.flatten(args)
    if tree != captured.in_tree:
        raise PlanError(
            f"{name} was planned for arguments of the structure\n    {captured.in_tree}\n"
            f"but is called with\n    {tree}\n    Call unity.optimize again for these. (docs: plan#shapes)"
        )
    leaves = packing.pack(leaves)  # as they are, if `shard` has packed them
    wrong = []
    for path, x, node in zip(captured.paths, leaves, captured.graph.inputs, strict=False):
        aval, tensor = jax.typeof(x), node.tensors[0]
        if tuple(aval.shape) != tensor.shape or aval.dtype != tensor.dtype:
            wrong.append(f"{path}: planned for {tensor}, called with {aval.str_short()}")
    refuse_others(f"{name} is called with other shapes than it was planned for", wrong)
    return leaves


def refuse_others(what: str, wrong: Sequence[str]) -> None:
    """Raises PlanError if anything is of another shape than it was planned for. `wrong`: what is, in words."""
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        lines = "\n    ".join([*wrong[:SHOWN], *more])
        raise PlanError(f"{what}:\n    {lines}\n    Call unity.optimize again for these. (docs: plan#shapes)")


def by_position(fn: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call in their positions, as planned. Raises PlanError if the function takes some by name alone."""
    name = getattr(fn, "__name__", "the function")
    try:
        bound = inspect.signature(fn).bind(*args, **named)
    except (TypeError, ValueError) as error:  # the second: some built-in functions have no signature
        raise PlanError(f"{name} cannot be called with {', '.join(named)}: {error}. (docs: plan#shapes)") from error
    if bound.kwargs:
        raise PlanError(
            f"{name} was planned for arguments by position, but takes {', '.join(bound.kwargs)} by name alone: fix such values"
            " with functools.partial before unity.optimize. (docs: plan#shapes)"
        )
    return bound.args
