"""Types: what they say each device holds, against plain counting."""

import itertools
import json
import re
from collections import Counter
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pieces import indices

from unity.pcg.ir.program import tensor_type
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import (  # fmt: skip
    PARTIAL,
    REPLICATED,
    UNUSED,
    degrees,
    digits,
    local_shape,
    misfit,
    partitioned,
    show,
    slice_count,
)

states = st.one_of(
    st.sampled_from((UNUSED, REPLICATED, PARTIAL)),
    st.builds(partitioned, st.integers(0, 2), st.sampled_from((1, 1, 1, 2, 3, 4, 6))),
)


@st.composite
def placed(draw):
    """A shape, axes and a type, which may not fit."""
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 4, 6, 8, 12, 24, 36)), min_size=1, max_size=3)))
    axes = tuple(Axis(f"a{k}", n, 0) for k, n in enumerate(draw(st.lists(st.sampled_from((2, 2, 3)), min_size=1, max_size=3))))
    return shape, tuple(draw(states) for _ in axes), axes


def holders(shape, type_, axes):
    """For every element, how many devices hold it; and the shapes of all pieces."""
    count, shapes = np.zeros(shape, int), set()
    for at in itertools.product(*(range(a.size) for a in axes)):
        held = indices(shape, type_, axes, dict(enumerate(at)))
        count[np.ix_(*held)] += 1
        shapes.add(tuple(len(i) for i in held))
    return count, shapes


@given(placed())
def test_a_fitting_type_gives_every_device_an_equal_piece(given_):
    shape, type_, axes = given_
    if misfit(shape, type_, axes) is None:
        count, shapes = holders(shape, type_, axes)
        assert shapes == {local_shape(shape, type_, axes)}
        assert set(count.ravel().tolist()) == {prod(a.size for a in axes) // slice_count(type_, axes)}
        assert prod(degrees(type_, axes, len(shape))) == slice_count(type_, axes)


@given(placed())
def test_a_type_that_does_not_fit_says_why(given_):
    shape, type_, axes = given_
    reason = misfit(shape, type_, axes)
    if reason is None:
        return
    beyond = [s for s in type_ if s.kind == "P" and s.dim >= len(shape)]
    if beyond:
        assert f"partitions dimension {beyond[0].dim} of a tensor of rank {len(shape)}" in reason
        return
    dim, size, degree, nearest = map(int, re.findall(r"\d+", reason))
    assert shape[dim] == size
    assert nearest % degree == 0
    assert 0 <= nearest - size < degree


@given(placed())
def test_what_no_two_digits_share_fits(given_):
    """A type fits exactly if its digits do not overlap and each divides its dimension."""
    shape, type_, axes = given_
    found = [d for d in digits(type_, axes) if d is not None]
    if any(d.dim >= len(shape) for d in found):
        return
    apart = not any(a.overlaps(b) for a, b in itertools.combinations(found, 2))
    divide = all(shape[d.dim] % (d.outer * d.size) == 0 for d in found)
    assert (misfit(shape, type_, axes) is None) == (apart and divide)


def test_axes_on_one_slot_nest_in_mesh_order():
    axes = (Axis("a", 2, 0), Axis("b", 3, 0))
    type_ = (partitioned(0), partitioned(0))
    held = {at: indices((12,), type_, axes, dict(enumerate(at)))[0].tolist() for at in itertools.product(range(2), range(3))}
    assert [held[at] for at in sorted(held)] == [[2 * k, 2 * k + 1] for k in range(6)]


def test_an_inner_digit_takes_a_share_of_every_part():
    axes = (Axis("a", 2, 0),)
    assert indices((12,), (partitioned(0, 3),), axes, {0: 1})[0].tolist() == [2, 3, 6, 7, 10, 11]


def test_every_state_shows_differently():
    axes = (Axis("a", 2, 0), Axis("b", 2, 0))
    every = (UNUSED, REPLICATED, PARTIAL, partitioned(0), partitioned(1), partitioned(1, 2))
    shown = Counter(show(t, axes, 2) for t in itertools.product(every, repeat=2))
    assert max(shown.values()) == 1
    assert show((partitioned(0), partitioned(0)), axes, 2) == "[a·b, -]"
    assert show((REPLICATED, PARTIAL), axes, 2) == "[-, -] *a +b"


def test_dimensions_that_jax_numbers_by_numpys_numbers_are_written_as_any() -> None:
    """A batched slice that is written becomes a scatter with such; a type that is written otherwise has another hash."""
    two, three = np.array([2, 3])
    assert repr(partitioned(two, three)) == repr(partitioned(2, 3))
    assert json.dumps(tensor_type((np.int64(91), np.int64(93)), np.dtype("float32")).shape) == "[91, 93]"
