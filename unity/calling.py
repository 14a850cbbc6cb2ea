"""What a plan is called with, held against what it was planned for."""

from __future__ import annotations

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
            wrong.append(f"    {path}: planned for {tensor}, called with {aval.str_short()}")
    if wrong:
        more = f"\n    and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise PlanError(
            f"{name} is called with other shapes than it was planned for:\n" + "\n".join(wrong[:SHOWN]) + more
            + "\n    Call unity.optimize again for these. (docs: plan#shapes)"
        )  # fmt: skip
    return leaves
