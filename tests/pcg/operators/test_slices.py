"""Slices of pieces, against numpy: for every start, limit and stride, each device has its part of the result."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from pieces import dual, join, take

from unity.pcg.capture.lossless import lossless
from unity.pcg.ir.program import Body, close
from unity.pcg.operators.layout import Layout, PlacedTensor
from unity.pcg.operators.table import TABLE
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import State


def sliced(n: int, start: int, limit: int, stride: int) -> Body:
    return close(jax.make_jaxpr(lambda x: lax.slice(x, (start, 0), (limit, 2), (stride, 1)))(np.zeros((n, 2))))


def on_pieces(body: Body, axis: Axis, before: State, after: State, x: np.ndarray, seed: np.ndarray) -> tuple[Any, Any]:
    """The result of a body's only equation on the pieces of its operand, and the gradient, each put together by plain indexing."""
    (e,), rng = body.equations, np.random.default_rng(0)
    tensors = [body.tensor(e.operands[0]), body.tensors[e.results[0]]]
    operand, part = (PlacedTensor(t.shape, t.dtype, (s,), (axis,)) for t, s in zip(tensors, (before, after), strict=True))
    layout = Layout(e.primitive, e.params, (operand,), (part,))
    run, results, gradients = TABLE["slice"].local, [], []
    assert run is not None
    pieces, seeds = take(x, (before,), (axis,), rng), take(seed, dual((after,)), (axis,), rng)
    for piece, cotangent in zip(pieces, seeds, strict=True):
        result, pullback = jax.vjp(lambda x: run([x], layout)[0], piece)
        results.append(result)
        gradients.append(pullback(cotangent)[0])
    whole = join(np.stack(results), tensors[1].shape, (after,), (axis,), 0)
    return whole, join(np.stack(gradients), tensors[0].shape, dual((before,)), (axis,), 0)


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
def test_pieces_of_slices_are_those_of_the_whole(stride: int) -> None:
    sizes, degrees, divided = (4, 6, 8, 10, 12), (2, 3), set()
    for n, degree in product(sizes, degrees):
        for start, limit in ((a, b) for a in range(n) for b in range(a + 1, n + 1)):
            x = np.arange(2.0 * n, dtype="float32").reshape(n, 2)
            body, expected = sliced(n, start, limit, stride), x[start:limit:stride]
            spec = spec_of(body, body.equations[0])
            factors = [f for f in (spec.factors if spec else ()) if f.name == "d0"]
            for factor, inner in ((f, inner) for f in factors for inner in (1, 2) if f.size % (inner * degree) == 0):
                (before,), (after,) = factor.states(inner)
                gradient = np.zeros_like(x)
                gradient[start:limit:stride] = expected + 1
                results = on_pieces(body, Axis("d", degree, 0), before, after, x, expected + 1)
                np.testing.assert_array_equal(results[0], expected)
                np.testing.assert_array_equal(results[1], gradient)
                divided.add((n, len(expected)))
    parts = {(n, m) for n in sizes for m in range(2, n + 1) if (n == m * stride if stride > 1 else n % m == 0)}
    assert divided == {(n, m) for n, m in parts if any(m % degree == 0 for degree in degrees)}


@pytest.mark.parametrize(("fn", "whole"), [
    (lambda x: x[:, ::2][:, ::-1], True),  # what the slice alone divides, the operator may lack
    (lambda x: x[:, ::2][::-1], False),
    (lambda x: x[::2, ::2][::-1], True),
    (lambda x: x[:, :4][:, ::-1], False),
])  # fmt: skip
def test_operators_may_lack_the_partition_of_a_dimension_that_a_slice_strides_through_alone(fn: Any, whole: bool) -> None:
    assert lossless(close(jax.make_jaxpr(fn)(np.zeros((4, 8))))) == whole
