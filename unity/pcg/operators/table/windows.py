"""Pooling and other windowed reductions: a dimension is a factor if slices of operand and result correspond."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import jax

from unity.pcg.operators.layout import Layout
from unity.pcg.operators.table.sliding import sliding
from unity.pcg.types.factors import OPERANDS, Facts, Slot, Spec, Window, at, operator
from unity.pcg.types.parallel_type import Shape

REDUCES = Facts(reads_buffers=True, alone=True, slides=True)
PICKS = replace(REDUCES, picks=True, extends=True)
# the first operand is a tangent, or a cotangent, of which the second selects elements
SELECTS = Facts((*OPERANDS, None), linear_in=(at(0),), reads_buffers=True, alone=True, slides=True)


def _spec(params: Any, operands: Any, results: Any, before: Shape, after: Shape, outside: str | None, linear: bool) -> Spec:
    """Return the specification of windows over the shape `before`, one for each element of the shape `after`.

    Operands and results have one rank.
    """
    ones = (1,) * len(before)
    lists = (
        *(before, after, params["window_dimensions"], params["window_strides"], map(tuple, params["padding"])),
        *(params.get("window_dilation") or ones, params.get("base_dilation") or ones),
    )
    windows = [
        (i, Window(*figures), tuple(Slot(i) if o.ndim else None for o in operands), (Slot(i),) * len(results))
        for i, figures in enumerate(zip(*lists, strict=True))
    ]
    factors, blocked = sliding(windows, outside)
    flops = prod(after) * prod(params["window_dimensions"])
    return Spec(factors, (frozenset({0}),) if linear else (), flops, blocked, tuple(w for _, w, *_ in windows))


def windowed(outside: str | None = None, linear: bool = False) -> Any:
    """Return the specification of a windowed reduction of one operand, or of several of one shape.

    Without `outside`, windows must not reach beyond a slice.
    """
    return lambda params, operands, results: _spec(params, operands, results, operands[0].shape, results[0].shape, outside, linear)


def window_pieces(operands: list[jax.Array], layout: Layout) -> list:
    """Reduce the windows of pieces, whose halos already include the padding."""
    split = {d.dim for placed in layout.operands for _, d in placed.slices}
    return layout.bind(*operands, padding=tuple((0, 0) if i in split else p for i, p in enumerate(layout.params["padding"])))


operator("reduce_window_sum", local=window_pieces, facts=replace(REDUCES, extends=True))(windowed("sum", linear=True))
operator("reduce_window_max", local=window_pieces, facts=PICKS)(windowed("max"))
operator("reduce_window_min", local=window_pieces, facts=PICKS)(windowed("min"))
operator("reduce_window", local=window_pieces, facts=REDUCES)(windowed())
operator("select_and_gather_add", local=window_pieces, facts=SELECTS)(windowed())


@operator("select_and_scatter_add", local=window_pieces, facts=SELECTS)
def select_and_scatter(params: Any, operands: Any, results: Any) -> Spec:
    """Source `[windows]` and operand. Each window lies in the slice of one device, which adds its source there."""
    source, operand = operands
    return _spec(params, operands, results, operand.shape, source.shape, None, False)
