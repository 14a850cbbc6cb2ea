"""Mixtures of experts that sort their tokens are products of rows in their own order, whatever way they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unity.pcg.capture.routing import without_sorting
from unity.pcg.capture.routing.integer_tables import IntegerTables
from unity.pcg.ir.program import Body, close
from unity.pcg.local.interpreter import run_body

TOKENS, WIDTH, HIDDEN, EXPERTS, TWO = 12, 4, 6, 5, 2
GROUPED, ROUTED = "ragged_dot_general", "routed_dot"
ARRAYS = tuple(
    np.random.default_rng(3).normal(size=shape).astype(np.float32)
    for shape in ((TOKENS, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
)
Arrays = tuple[Any, Any, Any, Any]


def chosen(x: Any, router: Any, k: int = TWO) -> tuple[Any, Any]:
    weights, experts = lax.top_k(x @ router, k)
    return jax.nn.softmax(weights), experts


def moved_back(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Sort by `argsort`, count by `bincount`, and move back by the order of the order."""
    weights, experts = chosen(x, router)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=EXPERTS)
    h = jax.nn.silu(lax.ragged_dot(x[order // TWO], up, sizes))
    y = lax.ragged_dot(h, down, sizes)[jnp.argsort(order)]
    return jnp.einsum("tkd,tk->td", y.reshape(-1, TWO, WIDTH), weights)


def added_up(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Weigh sorted rows, and add each to its token."""
    weights, experts = chosen(x, router)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=EXPERTS)
    h = jax.nn.gelu(lax.ragged_dot(x[order // TWO], up, sizes))
    h = lax.ragged_dot(h, down, sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // TWO].add(h)


def repeated(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Repeat tokens before they are sorted, count one-hot experts, and write each row to its place."""
    weights, experts = chosen(x, router)
    keys, order = lax.sort((experts.reshape(-1), jnp.arange(TWO * TOKENS)), num_keys=1)
    sizes = jax.nn.one_hot(experts, EXPERTS, dtype=jnp.int32).sum((0, 1))
    rows = jnp.take(jnp.repeat(x, TWO, axis=0), order, axis=0)
    h = jax.nn.relu(lax.ragged_dot(rows, up, sizes) + up[:, 0][keys])
    y = lax.ragged_dot(h, down, sizes)
    y = jnp.zeros_like(y).at[order].set(y, unique_indices=True)
    return (y.reshape(TOKENS, TWO, WIDTH) * weights[..., None]).sum(1)


def of_one(x: Any, router: Any, up: Any, down: Any) -> Any:
    """One expert for each token, counted after sorting, with the places written into an array; a normalized and halved row."""
    experts = jnp.argmax(x @ router, -1)
    order = jnp.argsort(experts)
    sizes = (experts[order][:, None] == jnp.arange(EXPERTS)[None, :]).sum(0)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(TOKENS))
    h = lax.ragged_dot(x[order], up, sizes)
    a, b = jnp.split(jax.nn.softmax(h), 2, axis=-1)
    return lax.ragged_dot(jnp.concatenate([a, b * a], -1), down, sizes)[places]


def differentiated(x: Any, router: Any, up: Any, down: Any) -> Any:
    """The gradient by the experts, which adds up the products of the rows of each."""
    up, down = jax.grad(lambda up, down: (moved_back(x, router, up, down) ** 2).sum(), (0, 1))(up, down)
    return up + jnp.swapaxes(down, 1, 2)


FORMS: tuple[Callable[..., Any], ...] = (moved_back, added_up, repeated, of_one)


def program(fn: Callable[..., Any]) -> Body:
    return close(jax.make_jaxpr(fn)(*ARRAYS))


def run(body: Body, *args: Any) -> Any:
    (result,) = run_body(body, args, ((),) * len(args), ((),), ())
    return result


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_no_row_is_sorted_outside_of_a_product(form: Callable[..., Any]) -> None:
    body = without_sorting(program(form))
    assert not {GROUPED, "sort", "scatter", "scatter-add"} & set(body.primitives)
    assert body.primitives.count(ROUTED) == 2


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_values_and_gradients_are_those_of_the_program(form: Callable[..., Any]) -> None:
    """Some experts have no token, and tokens of equal scores the same experts as before."""
    body = without_sorting(program(form))
    x, router, *weights = ARRAYS

    def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), (0, 1, 2, 3)))

    wanted, actual = gradients(form), gradients(lambda *a: run(body, *a))
    for scores in (router, np.zeros_like(router), np.eye(WIDTH, EXPERTS, dtype=np.float32) * 1e3):
        args = x, scores, *weights
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual(*args), wanted(*args))


def counted_otherwise(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Groups that are not those of the rows' experts."""
    experts = jnp.argmax(x @ router, -1)
    order = jnp.argsort(experts)
    sizes = jnp.bincount((experts + 1) % EXPERTS, length=EXPERTS)
    return lax.ragged_dot(lax.ragged_dot(x[order], up, sizes), down, sizes)[jnp.argsort(order)]


def out_of_range(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Experts that may be any numbers: rows with negative ones are in the first groups, but not counted for them."""
    experts = (x @ router).sum(-1).astype(int)
    order = jnp.argsort(experts)
    sizes = jnp.bincount(experts, length=EXPERTS)
    return lax.ragged_dot(lax.ragged_dot(x[order], up, sizes), down, sizes)[jnp.argsort(order)]


def left_sorted(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Rows that are returned as they are sorted."""
    experts = jnp.argmax(x @ router, -1)
    order = jnp.argsort(experts)
    sizes = jnp.bincount(experts, length=EXPERTS)
    return lax.ragged_dot(lax.ragged_dot(x[order], up, sizes), down, sizes)


def summed_along(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Rows that are added to the rows before them in sorted order."""
    experts = jnp.argmax(x @ router, -1)
    order = jnp.argsort(experts)
    sizes = jnp.bincount(experts, length=EXPERTS)
    h = jnp.cumsum(lax.ragged_dot(x[order], up, sizes), 0)
    return lax.ragged_dot(h, down, sizes)[jnp.argsort(order)]


def shifted(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Rows that are moved to the place of the row before."""
    experts = jnp.argmax(x @ router, -1)
    order = jnp.argsort(experts)
    sizes = jnp.bincount(experts, length=EXPERTS)
    return lax.ragged_dot(lax.ragged_dot(x[order], up, sizes), down, sizes)[(jnp.argsort(order) + 1) % TOKENS]


def numbered(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Rows that are multiplied by their place in sorted order."""
    experts = jnp.argmax(x @ router, -1)
    order = jnp.argsort(experts)
    sizes = jnp.bincount(experts, length=EXPERTS)
    h = lax.ragged_dot(x[order], up, sizes) * jnp.arange(TOKENS)[:, None]
    return lax.ragged_dot(h, down, sizes)[jnp.argsort(order)]


def of_all(x: Any, router: Any, up: Any, down: Any) -> Any:
    """One expert for all rows, counted once."""
    expert = jnp.argmax(x.mean(0, keepdims=True) @ router, -1)
    order, sizes = jnp.argsort(jnp.broadcast_to(expert, (TOKENS,))), jnp.bincount(expert, length=EXPERTS)
    return lax.ragged_dot(lax.ragged_dot(x[order], up, sizes), down, sizes)[jnp.argsort(order)]


def taken_apart(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Sorted rows of which each becomes two."""
    experts = jnp.argmax(x @ router, -1)
    order, sizes = jnp.argsort(experts), jnp.bincount(experts, length=EXPERTS)
    halves = x[order].reshape(2 * TOKENS, WIDTH // 2)
    return (lax.ragged_dot(halves, up[:, : WIDTH // 2], sizes) + lax.ragged_dot(halves, up[:, WIDTH // 2 :], sizes)).sum(0)


@jax.custom_jvp
def numbered_derivative(h: Any) -> Any:
    """A function of each row whose derivative depends on the place."""
    return h * 1.0


numbered_derivative.defjvp(lambda p, t: (p[0] * 1.0, t[0] * jnp.arange(TOKENS, dtype=t[0].dtype)[:, None]))


def numbered_backward(x: Any, router: Any, up: Any, down: Any) -> Any:
    experts = jnp.argmax(x @ router, -1)
    order, sizes = jnp.argsort(experts), jnp.bincount(experts, length=EXPERTS)
    h = numbered_derivative(lax.ragged_dot(x[order], up, sizes))
    return lax.ragged_dot(h, down, sizes)[jnp.argsort(order)]


def in_groups(key: Callable[..., Any], sizes: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Rows that are sorted by a function of their expert, in groups of some sizes."""

    def other(x: Any, router: Any, up: Any, down: Any) -> Any:
        experts = jnp.argmax(x @ router, -1)
        order, groups = jnp.argsort(key(experts)), sizes(experts)
        h = lax.ragged_dot(x[order], up[: len(groups)], groups)
        return lax.ragged_dot(h, down[: len(groups)], groups)[jnp.argsort(order)]

    other.__name__ = name
    return other


def numbers(labels: Any, count: int) -> Any:
    return (labels[:, None] == jnp.arange(count)).sum(0)


MISCOUNTED = (
    in_groups(lambda e: e - 1, lambda e: numbers(e - 1, EXPERTS - 1), "negative labels"),
    in_groups(lambda e: -e, lambda e: numbers(-e, EXPERTS), "negated labels"),
    in_groups(lambda e: e, lambda e: jnp.zeros(3, int).at[e].add(1, mode="clip"), "labels that are clamped where they are counted"),
    in_groups(lambda e: e * 0.5, lambda e: numbers(e * 0.5, 2), "labels between integers"),
    in_groups(lambda e: e, lambda e: jnp.bincount(e, length=EXPERTS).astype(bool).astype(int), "numbers as truth values"),
    in_groups(lambda e: e, lambda e: numbers(e, EXPERTS).astype(jnp.int4).astype(int), "numbers that wrap around"),
    in_groups(lambda e: e, lambda e: jnp.broadcast_to((e == 0)[:, None], (TOKENS, EXPERTS)).sum(0), "numbers of one label"),
    in_groups(lambda e: (e - 1).astype(jnp.uint8), lambda e: numbers((e - 1.0).astype(jnp.uint8), 4), "saturated labels"),
    in_groups(lambda e: (e * 60).astype(jnp.int8) & 7, lambda e: numbers((e * 60.0).astype(jnp.int8) & 7, EXPERTS), "from floats"),
    in_groups(lambda e: e * TOKENS + jnp.arange(TOKENS), lambda e: numbers(e, EXPERTS), "labels and places"),
)


def in_two_orders(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Rows that are sorted, and put back, by two sorts of which one is not stable."""
    experts = jnp.argmax(x @ router, -1)
    sizes = jnp.bincount(experts, length=EXPERTS)
    _, order = lax.sort((experts, jnp.arange(TOKENS)), num_keys=1, is_stable=False)
    return lax.ragged_dot(lax.ragged_dot(x[order], up, sizes), down, sizes)[jnp.argsort(jnp.argsort(experts))]


def of_sorted_sizes(x: Any, router: Any, up: Any, down: Any) -> Any:
    """As many experts as tokens, whose groups have the sizes of those of the tokens' places."""
    up, down = (jnp.tile(a, (3, 1, 1))[:TOKENS] for a in (up, down))
    experts = jnp.argmax(x @ jnp.tile(router, (1, 3))[:, :TOKENS], -1)
    order = jnp.argsort(experts)
    sizes = numbers(experts, TOKENS).at[order].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return lax.ragged_dot(lax.ragged_dot(x[order], up, sizes), down, sizes)[jnp.argsort(order)]


OTHERS = (counted_otherwise, out_of_range, left_sorted, summed_along, shifted, numbered, of_all, taken_apart, numbered_backward)
OTHERS += (*MISCOUNTED, in_two_orders, of_sorted_sizes)


@pytest.mark.parametrize("other", OTHERS, ids=lambda f: f.__name__)
def test_a_program_that_needs_the_order_of_sorted_rows_stays_as_it_is(other: Callable[..., Any]) -> None:
    body = program(other)
    result = without_sorting(body)
    assert result.primitives.count(GROUPED) == 2
    np.testing.assert_allclose(run(result, *ARRAYS), other(*ARRAYS), rtol=1e-5, atol=1e-5)


def test_gradients_inside_of_the_program_are_products_of_rows_with_labels_too() -> None:
    body = without_sorting(program(differentiated))
    assert GROUPED not in body.primitives
    np.testing.assert_allclose(run(body, *ARRAYS), differentiated(*ARRAYS), rtol=1e-4, atol=1e-5)


def of_large_labels(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Labels beyond all groups that 32 bits with a sign do not have."""
    experts = jnp.argmax(x @ router, -1).astype(jnp.uint32) * jnp.uint32(3 << 30)
    order, sizes = jnp.argsort(experts), numbers(experts, EXPERTS)
    return lax.ragged_dot(lax.ragged_dot(x[order], up, sizes), down, sizes)[jnp.argsort(order)]


def of_halved_labels(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Labels from the smallest integer, divided."""
    experts = jnp.argmax(x @ router, -1).astype(jnp.int8)
    keys = lax.div(experts * jnp.int8(2) + jnp.int8(-128), jnp.int8(2)) + jnp.int8(64)
    order, sizes = jnp.argsort(keys), numbers(experts, EXPERTS)
    return lax.ragged_dot(lax.ragged_dot(x[order], up, sizes), down, sizes)[jnp.argsort(order)]


def of_bytes(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Bytes that are added up in bytes."""
    experts = lax.top_k(x @ router, TWO)[1].reshape(-1)
    order, sizes = jnp.argsort(experts), jnp.bincount(experts, length=EXPERTS)
    rows, matrices = (10 * x).astype(jnp.int8)[order // TWO], (10 * up).astype(jnp.int8)
    products = lax.ragged_dot(rows, matrices, sizes, preferred_element_type=jnp.int8)
    return jnp.zeros((TOKENS, HIDDEN), jnp.int8).at[order // TWO].add(products)


def beside_nothing(x: Any, router: Any, up: Any, down: Any) -> Any:
    return of_one(x, router, up, down) + (jnp.arange(0) + 1).sum()


def by_places_in_a_column(x: Any, router: Any, up: Any, down: Any) -> Any:
    experts = jnp.argmax(x @ router, -1)
    order, sizes = jnp.argsort(experts), jnp.bincount(experts, length=EXPERTS)
    column = jnp.zeros((TOKENS, 1), order.dtype).at[order].set(jnp.arange(TOKENS)[:, None])
    later = jnp.broadcast_to(column, (TOKENS, EXPERTS)) > jnp.arange(EXPERTS)
    y = lax.ragged_dot(lax.ragged_dot(x[order], up, sizes), down, sizes)
    return y[column.reshape(-1)] + later.sum(1, keepdims=True)


TYPED = (of_large_labels, of_halved_labels, of_bytes, beside_nothing, by_places_in_a_column)


@pytest.mark.parametrize("form", TYPED, ids=lambda f: f.__name__)
def test_labels_places_and_rows_of_any_type_have_the_values_of_the_program(form: Callable[..., Any]) -> None:
    body = without_sorting(program(form))
    assert GROUPED not in body.primitives
    result, wanted = run(body, *ARRAYS), form(*ARRAYS)
    assert result.dtype == wanted.dtype
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)


def test_arrays_that_are_written_into_a_program_are_told_apart() -> None:
    arrays = [np.roll(np.arange(TOKENS), k) for k in range(8)]
    body = close(jax.make_jaxpr(lambda x: [x + jnp.asarray(a) * jnp.ones((), int) for a in arrays])(jnp.zeros(TOKENS, int)))
    known = IntegerTables()
    for e in body.equations:
        known.note(body, e)
    tables = [known.tables[e.results[0]].flat for e in body.equations if e.name == "mul"]
    np.testing.assert_array_equal(tables, arrays)
