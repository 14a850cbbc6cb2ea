"""Rearrangements against numpy: what they do to elements, when they are equal, and what they are made of."""

from math import prod

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unity.substitutions.language.rearrangement import after, dimensions, reshaped, resized, target_dimension, transposed, unchanged


def numbers(shape):
    return np.arange(prod(shape)).reshape(shape)


@st.composite
def factorized(draw, n):
    """A shape of n elements."""
    if n == 0:
        return draw(EMPTY)
    shape = []
    while n > 1:
        divisor = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
        shape.append(divisor)
        n //= divisor
    return tuple(shape)


@st.composite
def chains(draw, shape):
    """Some reshapes and transposes, and what numpy makes of them."""
    view, x = unchanged(shape), numbers(shape)
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            permutation = tuple(draw(st.permutations(range(x.ndim))))
            step, x = transposed(x.shape, permutation), x.transpose(permutation)
        else:
            target = draw(factorized(x.size))
            step, x = reshaped(x.shape, target), x.reshape(target)
        more = after(step, view)
        if more is None:
            return view, None
        view = more
    return view, x


SHAPES = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=0, max_size=4).map(tuple)
EMPTY = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple).filter(lambda shape: 0 in shape)


@given(st.data(), SHAPES)
def test_they_do_what_numpy_does(data, shape):
    view, x = data.draw(chains(shape))
    if x is not None:
        np.testing.assert_array_equal(np.asarray(view(jnp.asarray(numbers(shape)))), x)
        assert view.target == x.shape


@given(st.data(), SHAPES)
def test_equal_exactly_if_elements_are(data, shape):
    (one, x), (other, y) = data.draw(chains(shape)), data.draw(chains(shape))
    if x is not None and y is not None:
        assert (one == other) == (x.shape == y.shape and bool((x == y).all()))


@given(st.data(), SHAPES)
def test_an_inverse_undoes(data, shape):
    view, _ = data.draw(chains(shape))
    assert after(view.inverse(), view) == unchanged(shape)
    assert after(view, view.inverse()) == unchanged(view.target)


@given(st.data(), SHAPES)
def test_dimensions_are_those_that_numpy_merges(data, shape):
    view, x = data.draw(chains(shape))
    found = dimensions(view)
    if x is not None and found is not None:
        order = [d for group in found for d in group]
        rest = [d for d in range(len(shape)) if d not in order]
        assert all(shape[d] == 1 for d in rest)
        np.testing.assert_array_equal(numbers(shape).transpose((*order, *rest)).reshape(view.target), x)


@given(st.data(), SHAPES, st.integers(1, 3))
def test_a_kept_dimension_can_have_another_size(data, shape, n):
    """What is kept is where numpy has it: with one element of it left, and with n of them."""
    view, x = data.draw(chains(shape))
    for d in range(len(shape)):
        if x is None or target_dimension(view, d) is None:
            continue
        few = np.take(numbers(shape), [0] * n, d)
        place = target_dimension(view, d)
        np.testing.assert_array_equal(np.asarray(resized(view, d, n)(jnp.asarray(few))), np.take(x, [0] * n, place))
        assert n == 1 or resized(resized(view, d, n), d, shape[d]) == view


@given(st.data(), EMPTY)
def test_without_elements_all_do_the_same(data, shape):
    view, x = data.draw(chains(shape))
    assert x is not None
    assert view == reshaped(shape, x.shape)
    assert view(jnp.zeros(shape)).shape == x.shape
    if not view.identity:
        assert dimensions(view) is None
        assert all(target_dimension(view, d) is None for d in range(len(shape)))


def test_what_cuts_badly_has_no_rearrangement():
    turned = after(reshaped((3, 2), (2, 3)), transposed((2, 3), (1, 0)))
    assert turned is not None
    assert after(transposed((2, 3), (1, 0)), turned) is None
    assert after(reshaped((3, 2), (6,)), reshaped((2, 3), (3, 2))) == reshaped((2, 3), (6,))


def test_dimensions_of_a_merge_and_of_a_cut():
    assert dimensions(after(reshaped((4, 2, 3), (4, 6)), transposed((2, 4, 3), (1, 0, 2)))) == ((1,), (0, 2))
    assert dimensions(reshaped((4, 3), (2, 2, 3))) is None
    assert dimensions(reshaped((4, 1, 3), (12, 1))) == ((0, 2), ())
