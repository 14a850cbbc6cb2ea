"""A warning about functions that look like a training step or a gradient, and are planned with a backward pass of their own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from unity.pcg.capture.capture import Captured
from unity.pcg.ir.program import Tensor


def resembling_step(name: str, captured: Captured) -> str | None:
    """Return a warning if a function that is planned for training returns arrays like those of a differentiated argument.

    Such a function is likely a training step or a gradient, and nobody wants its gradient. An argument of a single array may have
    the shape of a result by chance, and causes no warning. Nor does one whose arrays are like those of an argument without a
    gradient, if they are returned once for each of these: a loss may return the next weights of a teacher, or of an average.
    """
    inputs, outputs = captured.graph.inputs, [v.tensor for v in captured.graph.outputs]
    counts = [argument.num_leaves for argument in captured.in_tree.children()]
    leaves = [range(start, start + count) for start, count in zip(accumulate(counts, initial=0), counts, strict=False)]
    arrays = [[inputs[k].tensors[0] for k in own] for own in leaves]
    averages = [alike for own, alike in zip(leaves, arrays, strict=True) if captured.differentiated.isdisjoint(own)]
    for number, (own, alike) in enumerate(zip(leaves, arrays, strict=True)):
        is_weights = len(alike) > 1 and not captured.differentiated.isdisjoint(own)
        if is_weights and _occurrences(outputs, alike) > averages.count(alike):
            return (
                f"{name} returns arrays like those of argument {number}, as a training step or a gradient does, and is planned with"
                " a backward pass of its own. Plan the loss, use unity.step for a training step, or give training=False. (docs:"
                " training)"
            )
    return None


def _occurrences(tensors: Sequence[Tensor], part: Sequence[Tensor]) -> int:
    """Return how often a sequence holds another, without overlap."""
    count = start = 0
    while start + len(part) <= len(tensors):
        is_here = list(tensors[start : start + len(part)]) == list(part)
        count, start = count + is_here, start + (len(part) if is_here else 1)
    return count
