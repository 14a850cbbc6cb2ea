"""Positions of windows that slide over dimensions, for convolutions and windowed reductions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unity.verify.semantics.domains import Array


def window_indices(size: int, window: int, stride: int, dilation: int) -> Array:
    """Return `[positions, window]`: the indices that a window covers at each of its positions over `size` padded indices."""
    count = max(0, (size - (window - 1) * dilation - 1) // stride + 1)
    return np.arange(count)[:, None] * stride + np.arange(window)[None, :] * dilation


def flat_window_indices(space: Sequence[int], indices: Sequence[Array]) -> Array:
    """Return `[all positions, all of a window]`: flat indices into a space, from the `window_indices` of each dimension."""
    flat = np.zeros((1, 1), np.int64)
    for n, along in zip(space, indices, strict=True):
        flat = flat[:, None, :, None] * n + along[None, :, None, :]
        flat = flat.reshape(flat.shape[0] * flat.shape[1], -1)
    return flat
