"""Peak memory and the reuse of later gradients, compared with brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unity.search.memory.peak import ReusableGradient, Turns


def plain_places(turns: Turns, at: int, own: list[float]) -> list[tuple[int, float]]:
    """Assign live values to the gradients one after the other."""
    held = [(n, i) for i, kept in enumerate(turns.kept) for n in kept if i <= at or turns.early[i]]
    free, found = sorted([*held, *((n, at) for n in own)], reverse=True), []
    for k, gradient in enumerate(turns.later):
        fits = next((f for f, (n, i) in enumerate(free) if gradient.first < i and n <= gradient.nbytes), None)
        if gradient.first < at and fits is not None:
            found.append((k, free.pop(fits)[0]))
    return found


def plain_highest(turns: Turns) -> tuple[int, float] | None:
    """Examine every operator."""
    found = None
    for at in sorted(range(len(turns.sizes)), key=turns.sizes.__getitem__, reverse=True):
        here = turns.sizes[at] - sum(n for _, n in plain_places(turns, at, list(turns.own[at])))
        found = (at, here) if found is None or here > found[1] else found
    return found


@st.composite
def turns(draw: st.DrawFn) -> Turns:
    """Draw turns with few distinct sizes, and with more operators than `MARKS`."""
    count = draw(st.integers(0, 90))
    nbytes = st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0])
    kept, own = (draw(st.lists(st.lists(nbytes, max_size=3), min_size=count, max_size=count)) for _ in range(2))
    early = draw(st.lists(st.sampled_from([False] * 7 + [True]), min_size=count, max_size=count))
    later = draw(st.lists(st.builds(ReusableGradient, nbytes, st.integers(-1, max(count - 1, 0))), max_size=25))
    return Turns(kept, early, own, sorted(later, key=lambda g: g.nbytes, reverse=True))


@given(turns())
def test_the_peak_is_that_of_brute_force(found: Turns) -> None:
    assert found.highest() == plain_highest(found)


@given(turns(), st.data())
def test_the_reuse_is_that_of_brute_force(found: Turns, data: st.DataObject) -> None:
    if found.kept:
        at = data.draw(st.integers(0, len(found.kept) - 1))
        own = list(found.own[at])
        assert found.reused(at, own) == plain_places(found, at, own)


def test_the_largest_dead_value_that_fits_reuses_a_gradient() -> None:
    kept = [[5.0], [3.0], [4.0]]
    found = Turns(kept, [False] * 3, [[]] * 3, [ReusableGradient(4.0, 0)])
    assert found.reused(2, []) == [(0, 4.0)]
    assert found.reused(1, []) == [(0, 3.0)]  # the last is not there yet, and the first is too large
    assert found.highest() == (2, 8.0)
    assert Turns(kept, [False] * 3, [[]] * 3, [ReusableGradient(4.0, 2)]).reused(2, []) == []
