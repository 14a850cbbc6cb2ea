"""Figures as people read them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unity.base.formatting import size, with_article


@given(st.floats(1, 1e13))
def test_a_negative_size_is_the_positive_one_with_a_sign(nbytes: float) -> None:
    assert size(-nbytes) == f"−{size(nbytes)}"


def test_sizes_have_a_unit_in_which_they_are_short() -> None:
    assert [size(n) for n in (0, 999, 1.5e3, -2.5e6, 80e9)] == ["0 B", "999 B", "1.5 kB", "−2.5 MB", "80 GB"]


def test_articles_follow_the_sound_of_a_types_name() -> None:
    names = {"int": "an", "array": "an", "Ellipsis": "an", "str": "a", "uint8": "a", "UnionType": "a", "update": "an"}
    assert {name: with_article(name) for name in names} == {name: f"{article} {name}" for name, article in names.items()}
