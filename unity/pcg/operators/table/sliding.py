"""Windows that slide along a dimension: what a device must have of it to compute its slice of the result.

With n indices, m windows and stride s, the devices' equal slices of input and result belong together if n = m s: window j
begins at index j s - p (p: the padding before), so device k's first window begins p indices before its slice begins, whatever k
is. What its last window covers beyond its slice is likewise the same for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unity.pcg.types.factors import Factor, Halo, Place


@dataclass(frozen=True)
class Window:
    """How a window moves along one dimension of `n` indices, `m` times. `base`: so far apart the indices are put before."""

    n: int
    m: int
    size: int
    stride: int
    padding: tuple[int, int]
    dilation: int = 1
    base: int = 1

    @property
    def span(self) -> int:
        """How many indices it covers from its first to its last."""
        return (self.size - 1) * self.dilation + 1

    def least(self, windows: int) -> int:
        """How many indices it takes for so many windows to lie inside, one stride after the other, none of them in the padding."""
        return -(-((windows - 1) * self.stride + self.span - 1) // self.base) + 1


def reach(window: Window, outside: str) -> Halo | str:
    """The halo of equal slices; or why the dimension is blocked."""
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
    """The factors that run along windows, and the dimensions along which none does, with the reasons.

    Each window is given with its dimension, and where operands and results have it. Without `outside`, what lies beyond a slice
    is not known.
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
