"""Text that every Python carries: its own language reference, half a megabyte, as bytes below 128."""

from collections.abc import Iterator
from pydoc_data.topics import topics

import jax
import numpy as np

VOCABULARY = 128


def batches(count: int, size: int, length: int, seed: int = 0) -> Iterator[dict[str, jax.Array]]:
    """Random windows of the text: `tokens` and the `labels` that follow them, both int32 [size, length]."""
    text = np.frombuffer("\n".join(topics.values()).encode("ascii", "replace"), np.uint8).astype(np.int32)
    rng = np.random.default_rng(seed)
    for _ in range(count):
        starts = rng.integers(len(text) - length, size=size)
        windows = np.stack([text[start : start + length + 1] for start in starts])
        yield {"tokens": jax.numpy.asarray(windows[:, :-1]), "labels": jax.numpy.asarray(windows[:, 1:])}
