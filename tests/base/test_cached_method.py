"""Methods whose results are cached on their object, for each tuple of arguments."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import pytest

from unity.base.cached_method import cached_method


@dataclass(frozen=True, eq=False)
class Divided:
    number: float
    computed: list[float] = field(default_factory=list)

    @cached_method(ZeroDivisionError)
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


def test_a_method_that_overrides_another_has_results_of_its_own() -> None:
    class Doubled(Divided):
        @cached_method()
        def by(self, divisor: float) -> float:
            return 2 * super().by(divisor)

    six = Doubled(6)
    assert [six.by(2), six.by(2), Divided.by(six, 2)] == [6, 6, 3]


def test_results_do_not_keep_their_object_alive() -> None:
    six = Divided(6)
    six.by(2)
    with pytest.raises(ZeroDivisionError):
        six.by(0)
    there = weakref.ref(six)
    del six
    assert there() is None
