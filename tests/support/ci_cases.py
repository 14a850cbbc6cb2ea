"""Cases that run by hand alone: CI leaves them out, because its time is limited and other cases state the same law."""

import os
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import TypeVar

import pytest

Case = TypeVar("Case")

CI = "CI" in os.environ
NEWEST = not version("jax").startswith("0.10.")
BY_HAND = pytest.mark.skipif(CI, reason="CI has no time for it")


def by_hand(*cases: Case) -> tuple[Case, ...]:
    """Return the cases, or none in CI."""
    return () if CI else cases


def one_in(count: int, cases: Iterable[Case]) -> tuple[Case, ...]:
    """Return the cases, or in CI every so many of them: of a law that each of them states alone."""
    return tuple(cases)[:: count if CI else 1]


def in_turn(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Return the cases, or in CI every second one: on the newest JAX those that the oldest leaves out, so that each runs once."""
    return tuple(cases)[1 if NEWEST else 0 :: 2] if CI else tuple(cases)


def ends(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return all points of a frontier, or in CI the first and the last."""
    return tuple(cases) if not CI or len(cases) < 2 else (cases[0], cases[-1])


def fewer(count: int) -> int:
    """Return how many examples are drawn: in CI, where they are the same in every run, a third as many, but two."""
    return min(count, max(2, count // 3)) if CI else count
