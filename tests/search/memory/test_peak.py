"""When most is held, and what lies where a later gradient will be: as a plain look at every operator has it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unity.search.memory.peak import Later, Turns


def plain_places(turns: Turns, at: int, own: list[float]) -> list[tuple[int, float]]:
    """One gradient after the other goes through all that is held."""
    held = [(n, i) for i, kept in enumerate(turns.kept) for n in kept if i <= at or turns.early[i]]
    free, found = sorted([*held, *((n, at) for n in own)], reverse=True), []
    for k, gradient in enumerate(turns.later):
        fits = next((f for f, (n, i) in enumerate(free) if gradient.first < i and n <= gradient.nbytes), None)
        if gradient.first < at and fits is not None:
            found.append((k, free.pop(fits)[0]))
    return found


def plain_highest(turns: Turns) -> tuple[int, float] | None:
    """Every operator is looked at."""
    found = None
    for at in sorted(range(len(turns.sizes)), key=turns.sizes.__getitem__, reverse=True):
        here = turns.sizes[at] - sum(n for _, n in plain_places(turns, at, list(turns.own[at])))
        found = (at, here) if found is None or here > found[1] else found
    return found


@st.composite
def turns(draw: st.DrawFn) -> Turns:
    """Few sizes, as many values have one; more operators than are looked at first."""
    count = draw(st.integers(0, 90))
    nbytes = st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0])
    kept, own = (draw(st.lists(st.lists(nbytes, max_size=3), min_size=count, max_size=count)) for _ in range(2))
    early = draw(st.lists(st.sampled_from([False] * 7 + [True]), min_size=count, max_size=count))
    later = draw(st.lists(st.builds(Later, nbytes, st.integers(-1, max(count - 1, 0))), max_size=25))
    return Turns(kept, early, own, sorted(later, key=lambda g: g.nbytes, reverse=True))


@given(turns())
def test_most_is_held_where_a_look_at_every_operator_finds_it(found: Turns) -> None:
    assert found.highest() == plain_highest(found)


@given(turns(), st.data())
def test_what_finds_a_place_is_what_a_look_at_every_value_finds(found: Turns, data: st.DataObject) -> None:
    if found.kept:
        at = data.draw(st.integers(0, len(found.kept) - 1))
        own = list(found.own[at])
        assert found.reused(at, own) == plain_places(found, at, own)


def test_the_largest_value_that_fits_lies_in_the_place_of_a_gradient_if_it_is_gone_in_time() -> None:
    kept = [[5.0], [3.0], [4.0]]
    found = Turns(kept, [False] * 3, [[]] * 3, [Later(4.0, 0)])
    assert found.reused(2, []) == [(0, 4.0)]
    assert found.reused(1, []) == [(0, 3.0)]  # the last is not there yet, and the first is too large
    assert found.highest() == (2, 8.0)
    assert Turns(kept, [False] * 3, [[]] * 3, [Later(4.0, 2)]).reused(2, []) == []
