"""Random rewritings of random programs keep values, gradients and types; thousands of them in `benchmarks.random_rewritings`."""

from __future__ import annotations

from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.random_rewritings import walk


@settings(max_examples=fewer(4))
@given(st.integers(0, 2**32 - 1))
def test_random_rewritings_keep_values_gradients_and_types(seed: int) -> None:
    walk(seed, parts=2, steps=2, each=2)
