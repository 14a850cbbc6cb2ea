"""Primitives as unknown functions: of each element of the result it is known only which elements of operands it depends on.

A sort, a decomposition or random bits depend on everything that lies in some blocked dimensions, and on nothing else. That is all
that a proof about the shared, leading dimensions needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from jax.extend import core

from unity.verify.semantics.domains import Array
from unity.verify.semantics.primitives.core import ANY_OTHER, InterpreterRun, PrimitiveCall, StackedValue, meaning

LARGEST = 1_000_000  # elements of results times elements of operands


def rowwise(run: InterpreterRun, name: str, operands: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Apply unknown functions to rows.

    Args:
        run: the interpretation.
        name: names the functions: calls of one name agree on equal rows.
        operands: rows of elements, `[*shared, blocked]`.
        shapes: of the results beside the shared dimensions.

    Returns:
        For each shape an array `[*shared, *shape]`, in which each place is its own function of all blocked elements.
    """
    columns = [x[..., k] for x in operands for k in range(x.shape[-1])]
    results = []
    for i, shape in enumerate(shapes):
        places = [run.domain.function(f"{name} {i}[{','.join(map(str, at))}]", *columns) for at in np.ndindex(*shape)]
        places = np.broadcast_arrays(*places) if places else [np.zeros((0,))]
        results.append(np.stack(places, -1).reshape((*places[0].shape, *shape)))
    return results


def flatten_last(x: Array, count: int) -> Array:
    """Return an array with its last `count` dimensions flattened into one."""
    return x.reshape((*x.shape[: x.ndim - count], -1))


def run_on_each_device(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Run a primitive of concrete operands by JAX, once for each place of the leading dimensions."""
    lead = np.broadcast_shapes(*(v.array.shape[: run.lead] for v in values))
    arrays = [np.broadcast_to(v.array, lead + run.shape(v.array)) for v in values]
    results = zip(*(call.run_by_jax([x[at] for x in arrays]) for at in np.ndindex(*lead)), strict=True)
    stacks = [np.stack(x).reshape((*lead, *x[0].shape)) for x in results]
    return [run.typed(x, True, result.dtype) for x, result in zip(stacks, call.results, strict=True)]


@meaning(ANY_OTHER)
def any_other(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """A primitive that the operator table lacks: every element of its results depends on all of its operands."""
    if any(isinstance(p, (core.Jaxpr, core.ClosedJaxpr)) for p in call.params.values()):
        raise call.refuse("no meaning is registered for it, and it runs a nested program")
    operands, results = (sum(prod(a.shape) for a in avals) for avals in (call.operands, call.results))
    if operands * results > LARGEST:
        raise call.refuse("no meaning is registered for it, and it is too large to be a function of all its operands")
    rows = [run.lift(v).reshape((*v.array.shape[: run.lead], -1)) for v in values]
    return [StackedValue(x, False) for x in rowwise(run, call.function_name, rows, [tuple(r.shape) for r in call.results])]
