"""The choice of a number of micro-batches: the least with which the fastest strategy fits, or a number that was asked for."""

from __future__ import annotations

from typing import TypeAlias

from unity.pcg.capture.capture import Captured
from unity.search.session import Search
from unity.transforms.least_number import LimitedChoice, LimitedWish, Numbered, Programs, Way
from unity.transforms.micro_batching.decomposition import number_of_samples
from unity.transforms.micro_batching.micro_batching import MicroBatching, micro_batched

MicroBatchingWish: TypeAlias = LimitedWish
MicroBatchingChoice: TypeAlias = LimitedChoice[MicroBatching]


def best(captured: Captured, wish: MicroBatchingWish, exactly: int | None = None) -> MicroBatchingChoice:
    """Return the best program over micro-batches that fits and is better than the plan to beat.

    Args:
        captured: The program.
        wish: The request.
        exactly: The number of micro-batches, if it is given; else numbers that divide the samples are tried.

    Raises:
        Mixed: The program does not decompose over its samples; names the operator and the user's line.
    """
    programs = Programs[MicroBatching](wish)
    if exactly is not None:
        first = micro_batched(captured, exactly, captured.bodies)
        programs.worth(Way(exactly, _text(exactly), lambda: (first, wish.search(first.after))))
        return MicroBatchingChoice(programs.chosen, programs.leanest)
    numbers = divisors(number_of_samples(captured))

    def way(k: int) -> Way[MicroBatching] | None:
        return _way(captured, wish, numbers[k - 1]) if k else None

    programs.refine(Numbered(way, len(numbers)))
    return MicroBatchingChoice(programs.chosen, programs.leanest)


def leanest_micro_batches(captured: Captured) -> MicroBatching:
    """Return the program over the most micro-batches. Raises Mixed if it does not decompose over its samples."""
    return micro_batched(captured, divisors(number_of_samples(captured))[-1], captured.bodies)


def _way(captured: Captured, wish: MicroBatchingWish, count: int) -> Way[MicroBatching]:
    def transform() -> tuple[MicroBatching, Search]:
        transformation = micro_batched(captured, count, captured.bodies)
        return transformation, wish.search(transformation.after)

    return Way(count, _text(count), transform)


def _text(count: int) -> str:
    return f"{count} micro-batches"


def divisors(size: int) -> list[int]:
    """Return the numbers of micro-batches to try for a number of samples, ascending: powers of two, or else all divisors."""
    every = [n for n in range(2, size + 1) if size % n == 0]
    return [n for n in every if n & (n - 1) == 0] or every
