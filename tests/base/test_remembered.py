"""Methods that compute their result once for each tuple of arguments."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import pytest

from unity.base.remembered import remembered


@dataclass(frozen=True, eq=False)
class Divided:
    number: float
    computed: list[float] = field(default_factory=list)

    @remembered(ZeroDivisionError)
    def by(self, divisor: float) -> float:
        """Divide."""
        self.computed.append(divisor)
        return self.number / divisor


def test_results_are_computed_once_for_each_object_and_argument() -> None:
    six, nine = Divided(6), Divided(9)
    assert [six.by(2), six.by(3), six.by(2), nine.by(3)] == [3, 2, 3, 3]
    assert (six.computed, nine.computed) == ([2, 3], [3])
    assert Divided.by.__doc__ == "Divide."


def test_named_errors_are_raised_again_and_others_are_not_kept() -> None:
    six = Divided(6)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            six.by(0)
    for _ in range(2):
        with pytest.raises(TypeError):
            six.by("two")  # type: ignore[arg-type]
    assert six.computed == [0, "two", "two"]


def test_results_do_not_keep_their_object_alive() -> None:
    six = Divided(6)
    six.by(2)
    there = weakref.ref(six)
    del six
    gc.collect()
    assert there() is None
