"""How operators and tensors are cut into pieces, held against sets of indices."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unity.baselines.flexflow.strategy.pieces import Slices, largest_degree, overlap, share, slices, split_shape
from unity.baselines.flexflow.strategy.regions import shared
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import Node


def only(fn, *shapes: tuple[int, ...]) -> Node:
    """The one operator of a function."""
    graph = capture(fn, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes), argnums=0).graph
    (node,) = [n for n in graph.nodes if n.kind != "input"]
    return node


def held(cut: Slices) -> list[np.ndarray]:
    """For every piece, which elements of the tensor it has."""
    found = []
    for piece in range(prod(cut.degrees)):
        index = np.unravel_index(piece, cut.degrees)
        masks = []
        for n, cuts in zip(cut.shape, cut.cuts, strict=True):
            x = np.arange(n)
            masks.append(np.logical_and.reduce([x // (n // (o * d)) % d == index[along] for o, d, along in cuts], initial=True))
            masks[-1] = np.broadcast_to(masks[-1], (n,))
        found.append(np.logical_and.reduce(np.meshgrid(*masks, indexing="ij")))
    return found


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> Slices:
    """Any degrees of up to three dimensions of an operator, each cutting some dimension of the tensor, or none."""
    degrees = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3)))
    found: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for along, degree in enumerate(degrees):
        dim = draw(st.integers(0, len(shape)))
        if degree > 1 and dim < len(shape):
            inside = max((o * d for o, d, _ in found[dim]), default=1)  # cuts of one dimension do not overlap
            outer = draw(st.sampled_from([1, 2])) * inside
            if shape[dim] % (outer * degree) == 0:
                found[dim].append((outer, degree, along))
    return Slices(shape, tuple(map(tuple, found)), degrees)


SHAPES = st.sampled_from([(12,), (12, 36), (4, 6, 12)])


@given(st.data())
def test_overlaps_count_the_elements_of_both_pieces(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    a, b = data.draw(cuts(shape)), data.draw(cuts(shape))
    found = overlap(a, b)
    wanted = {(i, j): int((x & y).sum()) for i, x in enumerate(held(a)) for j, y in enumerate(held(b)) if (x & y).any()}
    assert dict(zip(zip(found.first, found.second, strict=True), found.elements, strict=True)) == wanted
    assert {int(x.sum()) for x in held(a)} == {prod(a.local)}
    assert a.copied == (sum(int(x.sum()) for x in held(a)) > prod(shape))


@given(st.data())
def test_parts_of_a_weight_that_the_same_devices_read(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    readers = []
    for _ in range(data.draw(st.integers(1, 3))):
        cut = data.draw(cuts(shape))
        pieces = prod(cut.degrees)
        readers.append((cut, tuple(data.draw(st.lists(st.integers(0, 4), min_size=pieces, max_size=pieces)))))
    readers_of = np.zeros((5, *shape), bool)
    for cut, devices in readers:
        for mask, device in zip(held(cut), devices, strict=True):
            readers_of[device] |= mask
    patterns, counts = np.unique(readers_of.reshape(5, -1), axis=1, return_counts=True)
    wanted = {tuple(np.flatnonzero(p).tolist()): int(c) for p, c in zip(patterns.T, counts, strict=True) if p.sum() > 1}
    found = shared(tuple(readers))
    parts = [tuple(part.tolist()) for part in np.split(found.devices, np.cumsum(found.counts))[:-1]]
    assert dict(zip(parts, found.elements.tolist(), strict=True)) == wanted
    assert len(parts) == len(wanted)


def test_a_product_needs_rows_of_one_operand_and_columns_of_the_other() -> None:
    """FlexFlow, figure 3: U = V W in 2 × 2 pieces."""
    node = only(jnp.matmul, (8, 32), (32, 12))
    assert split_shape(node) == (8, 12)
    assert [largest_degree(node, dim) for dim in range(2)] == [8, 12]
    assert [slices(node, (2, 2), p).local for p in range(3)] == [(4, 32), (32, 6), (4, 6)]
    assert share(node, (2, 2)) == pytest.approx(1 / 4)


def test_a_loss_is_split_along_its_largest_operand() -> None:
    node = only(lambda x: jnp.mean(x**2), (8, 32))
    assert split_shape(node) == (8, 32)
    assert slices(node, (4, 1), 0).local == (2, 32)


def test_dimensions_that_the_table_blocks_are_not_split() -> None:
    node = only(lambda x: jnp.sort(x, axis=1), (8, 32))
    assert [largest_degree(node, dim) for dim in range(2)] == [8, 1]


@given(st.data())
def test_a_piece_reaches_into_those_beside_it(data: st.DataObject) -> None:
    n = 24
    a, degree = data.draw(cuts((n,))), data.draw(st.sampled_from([2, 3, 4, 6]))
    before, after = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    b = Slices((n,), (((1, degree, 0),),), (degree,), ((before, after),))
    found = overlap(a, b)
    size, x = n // degree, np.arange(n)
    reached = [(x >= j * size - before) & (x < (j + 1) * size + after) for j in range(degree)]
    wanted = {(i, j): int((p & q).sum()) for i, p in enumerate(held(a)) for j, q in enumerate(reached) if (p & q).any()}
    assert dict(zip(zip(found.first, found.second, strict=True), found.elements, strict=True)) == wanted


def test_a_convolution_needs_rows_beside_its_own() -> None:
    def convolve(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME")

    node = only(convolve, (2, 3, 16, 16), (4, 3, 5, 3))
    cut = slices(node, (1, 1, 4, 2), 0)
    assert (cut.local, cut.halos) == ((2, 3, 4, 8), ((0, 0), (0, 0), (2, 2), (1, 1)))
    whole = slices(node, (1, 1, 1, 1), 0)
    assert sum(overlap(whole, cut).elements) == 2 * 3 * (16 + 3 * 4) * (16 + 2)  # three borders along rows, one along columns
