"""Micro-batches: the decomposition of a loss over samples, the loop over them, and the choice of their number."""

from unity.transforms.micro_batching.choose import MicroBatchingChoice, MicroBatchingWish, best, leanest_micro_batches
from unity.transforms.micro_batching.micro_batching import (
    MicroBatching,
    MicroBatchingRecord,
    micro_batched,
    with_recomputed_steps,
)

__all__ = [
    "MicroBatching",
    "MicroBatchingChoice",
    "MicroBatchingRecord",
    "MicroBatchingWish",
    "best",
    "leanest_micro_batches",
    "micro_batched",
    "with_recomputed_steps",
]
