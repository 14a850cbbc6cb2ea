"""Windowed reductions, pooling and its derivatives, over any domain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
from jax.extend import core

from unity.verify.semantics.domains import Array, ElementDomain
from unity.verify.semantics.primitives.core import PLAIN, InterpreterRun, PrimitiveCall, StackedValue, meaning
from unity.verify.semantics.primitives.reduction import fold_in_order, identity, reduced
from unity.verify.semantics.primitives.reshaping import padded
from unity.verify.semantics.primitives.sliding import flat_window_indices, window_indices


def window_rows(run: InterpreterRun, call: PrimitiveCall, array: Array, fill: Array) -> Array:
    """Return `[*lead, positions, window]`: the elements under a window at each of its positions, `fill` outside the array."""
    params, rank = call.params, len(run.shape(array))
    base_dilation = params.get("base_dilation") or (1,) * rank
    window_dilation = params.get("window_dilation") or (1,) * rank
    config = [(low, high, d - 1) for (low, high), d in zip(params["padding"], base_dilation, strict=True)]
    x = padded(run, array, fill, config)
    space = run.shape(x)
    dimensions = zip(space, params["window_dimensions"], params["window_strides"], window_dilation, strict=True)
    indices = flat_window_indices(space, [window_indices(*dimension) for dimension in dimensions])
    return np.take(x.reshape((*x.shape[: run.lead], -1)), indices, -1)


def unflattened(run: InterpreterRun, x: Array, shape: Sequence[int]) -> Array:
    """Return flat positions `[*lead, positions]` in a local shape."""
    return x.reshape((*x.shape[: run.lead], *shape))


@meaning("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def window_reduction(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """A reduction of each window of one operand, which is surrounded by the identity element."""
    kind, dtype = call.name.removeprefix("reduce_window_"), call.results[0].dtype
    domain = PLAIN if values[0].known else run.domain
    fill = identity(domain, kind, dtype).reshape((1,) * run.lead)
    result = reduced(domain, kind, window_rows(run, call, values[0].array, fill), -1, dtype)
    return [run.typed(unflattened(run, result, call.results[0].shape), domain is PLAIN, dtype)]


@meaning("reduce_window")
def general_window_reduction(
    run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]
) -> list[StackedValue]:  # fmt: skip
    """Each window folded by `jaxpr`, from initial values (the second half of `values`), which also surround the operands."""
    n = len(values) // 2
    rows = []
    for value, start in zip(values[:n], values[n:], strict=True):
        fill = start.array if value.known == start.known else run.lift(start)
        rows.append(StackedValue(window_rows(run, call, value.array, fill), value.known))
    jaxpr: Any = call.params["jaxpr"]
    program = jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, call.params.get("consts", ()))
    results = fold_in_order(run, program, list(values[n:]), rows)
    pairs = zip(results, call.results, strict=True)
    return [StackedValue(unflattened(run, v.array, r.shape), v.known) for v, r in pairs]


def selections(domain: ElementDomain, select: str, rows: Array) -> list[Array]:
    """Return for each place of a window an element that is 1 where `select` chooses that place, and otherwise 0."""
    places = list(np.moveaxis(rows, -1, 0))
    return [domain.function(f"selected by {select} of {len(places)}, {k}", *places) for k in range(len(places))]


def _surrounding(run: InterpreterRun, call: PrimitiveCall) -> Array:
    """Return the element around an operand that `select_prim` never prefers."""
    select = str(call.params["select_prim"])
    return run.domain.constant(np.full((1,) * run.lead, -np.inf if select == "ge" else np.inf))


@meaning("select_and_gather_add")
def select_and_gather(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Tangents and operand: for each window, the tangent of the element that is selected."""
    domain, surrounding = run.domain, _surrounding(run, call)
    tangents, operand = (run.lift(v) for v in values)
    rows = window_rows(run, call, operand, surrounding)
    tangent_rows = window_rows(run, call, tangents, domain.constant(np.zeros((1,) * run.lead)))
    weights = selections(domain, str(call.params["select_prim"]), rows)
    terms = [domain.mul(w, t) for w, t in zip(weights, np.moveaxis(tangent_rows, -1, 0), strict=True)]
    return [StackedValue(unflattened(run, reduce(domain.add, terms), call.results[0].shape), False)]


@meaning("select_and_scatter_add")
def select_and_scatter(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Source and operand: each window's source is added where the window's element is selected."""
    domain = run.domain
    source, operand = (run.lift(v) for v in values)
    rows = window_rows(run, call, operand, _surrounding(run, call))
    shape = run.shape(operand)
    size = int(np.prod(shape))
    positions = np.arange(size).reshape((1,) * run.lead + shape)
    flat = window_rows(run, call, positions, np.full((1,) * run.lead, -1)).reshape(rows.shape[-2:])  # -1: outside
    sources = source.reshape((*source.shape[: run.lead], -1))
    lead = np.broadcast_shapes(rows.shape[: run.lead], sources.shape[: run.lead])
    result = np.array(np.broadcast_to(domain.constant(np.zeros(())), (*lead, size)))
    for k, chosen in enumerate(selections(domain, str(call.params["select_prim"]), rows)):
        for window in np.flatnonzero(flat[:, k] >= 0):
            at = flat[window, k]
            result[..., at] = domain.add(result[..., at], domain.mul(chosen[..., window], sources[..., window]))
    return [StackedValue(unflattened(run, result, shape), False)]
