"""Lanes: a loop that takes the steps of several equal loops at once, each in a lane of its carries and of its step's values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from jax import lax

from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Atom, Body, Tensor, tensor_type
from unity.transforms.loops.dependences import ScanParts
from unity.transforms.loops.mapped_steps import MappedSteps


def batched_step(parts: ScanParts, shared: Sequence[bool], size: int) -> Body:
    """Return a loop's step for several loops at once. `shared` tells the inputs that are the same for all."""
    step, writer = parts.step, EquationWriter({}, count())
    types = (step.tensors[v] for v in step.inputs)
    inputs = [writer.new(t if same else with_lanes(t, 0, size)) for t, same in zip(types, shared, strict=True)]
    separate = {v for v, same in zip(step.inputs, shared, strict=True) if not same}
    values = MappedSteps(writer, dict(zip(step.inputs, inputs, strict=True)), separate, step.tensors)
    for e in step.equations:
        values.add(e)
    outputs = list[Atom]()
    for a in step.outputs:
        atom = values.atoms.get(a, a)
        outputs += [atom] if a in values.stacked else writer.trace(lambda x: repeated(x, size), [atom], parts.scan)
    return Body(tuple(inputs), tuple(outputs), tuple(writer.equations), writer.tensors)


def with_lanes(tensor: Tensor, d: int, size: int) -> Tensor:
    """Return a type with a new dimension."""
    return tensor_type((*tensor.shape[:d], size, *tensor.shape[d:]), tensor.dtype)


def repeated(x: Any, size: int) -> Any:
    """Return a value for every lane."""
    return lax.broadcast(x, (size,))
