"""The choice of a number of micro-batches: the user's, or the least with which the fastest strategy fits."""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

from unity.pcg.capture.capture import Captured
from unity.pcg.parallel.stages import Mixed
from unity.transforms.least_number import LimitedChoice, LimitedWish, Numbered, Programs, Way
from unity.transforms.micro_batching.decomposition import counts
from unity.transforms.micro_batching.micro_batching import MicroBatching, micro_batched

MicroBatchingWish: TypeAlias = LimitedWish
MicroBatchingChoice: TypeAlias = LimitedChoice[MicroBatching]


def best(captured: Captured, wish: MicroBatchingWish, exactly: int | None = None) -> MicroBatchingChoice:
    """Return the best program over micro-batches that fits and is better than the plan to beat.

    Args:
        captured: The program.
        wish: The request.
        exactly: The number of micro-batches. By default, the numbers that divide the samples are tried.

    Raises:
        Mixed: The program does not decompose over its samples; names the operator and the user's line.
    """
    programs = Programs[MicroBatching](wish)
    if exactly is not None:
        first = micro_batched(captured, exactly, captured.bodies)
        programs.worth(Way(exactly, _text(exactly), lambda: (first, wish.search(first.after))))
        return programs.choice
    numbers = counts(captured)

    @cache
    def transformation(count: int) -> MicroBatching | None:
        try:
            return micro_batched(captured, count, captured.bodies)
        except Mixed:
            return None

    def way(k: int) -> Way[MicroBatching] | None:
        batched = transformation(numbers[k - 1]) if k else None
        return batched and Way(batched.count, _text(batched.count), lambda: (batched, wish.search(batched.after)))

    programs.refine(Numbered(way, len(numbers)))
    return programs.choice


def leanest_micro_batches(captured: Captured) -> MicroBatching:
    """Return the program over the most micro-batches. Raises Mixed if it does not decompose over its samples."""
    return micro_batched(captured, counts(captured)[-1], captured.bodies)


def _text(count: int) -> str:
    return f"{count} micro-batches"
