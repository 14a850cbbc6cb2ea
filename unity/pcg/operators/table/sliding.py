"""Windows that slide along a dimension: the halo that a device needs to compute its slice of the result.

With n indices, m windows and stride s, the devices' equal slices of input and result correspond if n = m s: window j begins at
index j s - p, where p is the padding before the first index, so the first window of every device begins p indices before its slice.
Likewise, the last window of every device reaches equally far beyond its slice.
"""

from __future__ import annotations

from collections.abc import Iterable

from unity.pcg.types.factors import Factor, Halo, Place, Window


def reach(window: Window, outside: str) -> Halo | str:
    """Return the halo of equal slices, or the reason why the dimension is blocked."""
    before, after = window.padding[0], window.span - window.stride - window.padding[0]
    if window.m == 1:
        return "there is one window, over all of it"
    if window.base > 1:
        return "its indices are put apart, as in a transposed convolution"
    if window.n != window.m * window.stride:
        return (
            f"{window.m} windows at a stride of {window.stride} do not go evenly over its {window.n} indices, so slices of operand"
            " and result do not belong together"
        )
    if before < 0:
        return "it is cropped"
    if before >= window.span:
        return "there are windows in the padding alone"
    return Halo(before, max(after, 0), outside)


Places = tuple[Place, ...]
Sliding = tuple[tuple[Factor, ...], tuple[tuple[int, str], ...]]


def sliding(windows: Iterable[tuple[int, Window, Places, Places]], outside: str | None) -> Sliding:
    """Return the factors along which windows move, and the blocked dimensions with the reasons.

    Args:
        windows: (dimension, window, its places in the operands, its places in the results).
        outside: the reduction whose neutral element windows read beyond the border. None: it is unknown, so that dimensions whose
            windows need a halo are blocked.
    """
    factors: list[Factor] = []
    blocked: list[tuple[int, str]] = []
    for dim, window, operands, results in windows:
        halo = reach(window, outside or "")
        if not isinstance(halo, str) and not (halo.before or halo.after):
            factors.append(Factor(f"d{dim}", window.m, operands, results))
        elif not isinstance(halo, str) and outside:
            factors.append(Factor(f"d{dim}", window.m, operands, results, halo=halo))
        elif window.n > 1:
            blocked.append((dim, halo if isinstance(halo, str) else "its windows overlap, or are padded"))
    return tuple(factors), tuple(blocked)
