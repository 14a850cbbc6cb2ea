"""Pooling and other windowed reductions: a dimension is a factor where the window does not move along it."""

from __future__ import annotations

from math import prod
from typing import Any

from unity.pcg.factors import Factor, Slot, Spec, operator


def windowed(linear: bool) -> Any:
    """`reduce_window` and its kin: one operand (or several alike), same rank out."""

    def spec(params: Any, operands: Any, results: Any) -> Spec:
        window, strides, padding = params["window_dimensions"], params["window_strides"], params["padding"]
        still = [
            i
            for i, n in enumerate(operands[0].shape)
            if n > 1 and window[i] == 1 and strides[i] == 1 and tuple(padding[i]) == (0, 0) and results[0].shape[i] == n
        ]
        factors = tuple(
            Factor(
                f"d{i}", operands[0].shape[i], tuple(Slot(i) if o.ndim else None for o in operands), (Slot(i),) * len(results)
            )
            for i in still
        )
        return Spec(factors, (frozenset({0}),) if linear else (), prod(results[0].shape) * prod(window))

    return spec


operator("reduce_window_sum")(windowed(linear=True))
operator("select_and_gather_add", "select_and_scatter_add")(windowed(linear=False))
operator("reduce_window_max", "reduce_window_min", "reduce_window")(windowed(linear=False))
