"""Products of rows with labels are those of each row and the matrix of its label, in blocks and in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unity.pcg.operators.routed_product import block_rows, multiplied_rows, routed_dot

ROWS, COUNT = 256, 8
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(ROWS, 6)), RNG.normal(size=(COUNT, 6, 4))
LABELS = {
    "any": RNG.integers(0, COUNT + 1, ROWS),
    "one": np.full(ROWS, COUNT - 1),
    "none": np.full(ROWS, COUNT),
    "few of most": np.minimum(RNG.poisson(1.0, ROWS), COUNT),
}


def by_row(x: Any, y: Any, labels: Any) -> Any:
    return jnp.einsum("rk,rkn->rn", x, jnp.concatenate([y, jnp.zeros_like(y[:1])])[labels])


def product(x: Any, y: Any, labels: Any) -> Any:
    return routed_dot(x, y, labels, COUNT)


def derivatives(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A value, its gradients, and a derivative of these."""

    def loss(x: Any, y: Any, labels: Any) -> Any:
        return jnp.sum(jnp.sin(fn(x, y, labels)))

    def second(x: Any, y: Any, labels: Any) -> Any:
        return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, y, labels))

    return jax.jit(lambda *a: (fn(*a), jax.grad(loss, (0, 1))(*a), jax.grad(second, (0, 1))(*a)))


def same(actual: Any, wanted: Any, rtol: float = 1e-9) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), actual, wanted)


@pytest.mark.parametrize("rows", [ROWS, 12], ids=["blocks", "groups"])
def test_values_and_gradients_are_those_of_each_row(rows: int) -> None:
    assert bool(block_rows(rows, COUNT)) == (rows == ROWS)
    with jax.enable_x64(True):
        actual, wanted = derivatives(product), derivatives(by_row)
        for labels in LABELS.values():
            args = jnp.asarray(X[:rows]), jnp.asarray(Y), jnp.asarray(labels[:rows])
            same(actual(*args), wanted(*args))


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (None, None, 0)], ids=str)
def test_a_mapped_product_is_that_of_each_element(axes: tuple[int | None, ...]) -> None:
    with jax.enable_x64(True):
        args = jnp.asarray(X[:12]), jnp.asarray(Y), jnp.asarray(LABELS["any"][:12])
        mapped = [x if d is None else jnp.stack([x, x[::-1]]) for x, d in zip(args, axes, strict=True)]
        same(*(jax.jit(jax.vmap(derivatives(fn), axes))(*mapped) for fn in (product, by_row)))


def test_labels_may_have_too_few_bits_for_their_number() -> None:
    x, y = jnp.ones((2, 3, 1)), jnp.arange(200.0).reshape(200, 1, 1)
    labels = jnp.asarray([[0, 5, 127], [126, 1, 2]], jnp.int8)
    product = jax.vmap(lambda x, labels: routed_dot(x, y, labels, 200))(x, labels)
    np.testing.assert_array_equal(product[..., 0], labels)
    with_matrices = jax.vmap(lambda x, y, labels: routed_dot(x, y, labels, 200))(x, jnp.stack([y, -y]), labels)
    np.testing.assert_array_equal(with_matrices[..., 0], [labels[0], -labels[1]])


def test_each_row_is_multiplied_about_twice_however_many_labels_there_are() -> None:
    """Not once for every label, as `lax.ragged_dot` does on CPUs and GPUs."""
    for count in (8, 32, 128):
        assert multiplied_rows(1 << 16, count, block_rows(1 << 16, count)) <= 2 << 16
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((512, 16), "float32"), ((16, 16, 16), "float32"), ((512,), "int32"))]
    analysis: Any = jax.jit(lambda x, y, i: routed_dot(x, y, i, 16)).lower(*shapes).compile().cost_analysis()
    assert analysis["flops"] < 2.5 * 2 * 512 * 16 * 16


def test_gradients_of_narrow_matrices_are_added_up_over_blocks_in_float32() -> None:
    x, y = jnp.ones((4096, 1), jnp.bfloat16), jnp.ones((4096, 1), jnp.bfloat16)
    labels = jnp.zeros(4096, jnp.int32)
    assert 0 < block_rows(4096, 8) < 4096 // 2
    assert routed_dot(x, y, labels, 8, True)[0, 0, 0] == 4096
