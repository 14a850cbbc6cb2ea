"""The cache keeps the most recently used values that fit its capacity."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unity.base.lru_cache import LRUCache

USES = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 5)), max_size=40)


@given(uses=USES, most=st.integers(0, 12))
def test_the_least_recently_used_values_are_evicted(uses: list[tuple[str, int]], most: int) -> None:
    """Against a list of all uses, the most recent one last."""
    recent, listed = LRUCache[str, int](most, lambda n: n), list[tuple[str, int]]()
    for key, n in uses:
        if key in recent:
            n = recent[key]
        else:
            recent[key] = n
        listed = [(k, m) for k, m in listed if k != key] + [(key, n)]
        while sum(m for _, m in listed) > most and len(listed) > 1:
            listed.pop(0)
        assert list(recent.items()) == listed
        assert recent.used == sum(m for _, m in listed)


def test_a_replaced_value_gives_its_bytes_back() -> None:
    recent = LRUCache[str, int](10, lambda n: n)
    recent["a"], recent["b"] = 6, 4
    recent["a"] = 3
    assert (sorted(recent.items()), recent.used) == ([("a", 3), ("b", 4)], 7)
