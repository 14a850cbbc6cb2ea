"""The law of composites: an operator offers what its equations offer as operators of their own, joined by changes of type."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from separate_equations import INSIDE, Prices, lost

from unity.pcg.capture.capture import capture
from unity.pcg.ir.program import Body, close, tensor_type
from unity.pcg.propagation.choices import choices, choices_with_moves
from unity.pcg.propagation.dominance import COPIES
from unity.pcg.propagation.placement import along_axis
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, partitioned

ONE_AXIS, TWO_AXES = (Axis("d0", 2, 0),), (Axis("n0", 2, 0), Axis("d0", 2, 1))


def f(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def chosen(x: Any, y: Any) -> Any:
    return jax.nn.relu(jnp.where(x > 0, x, y))


LARGE, VECTOR = f(512, 1024), f(1024)
FORMS: dict[str, tuple[Any, ...]] = {
    "tanh of exp": (lambda x: jnp.tanh(jnp.exp(x)), LARGE),
    "rows of exp": (lambda x: jnp.exp(x).sum(1), LARGE),
    "log of rows": (lambda x: jnp.log(jnp.exp(x).sum(1)), LARGE),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, 1), LARGE),
    "softmax": (lambda x: jax.nn.softmax(x, 1), LARGE),
    "normalization": (lambda x: x * lax.rsqrt((x * x).mean(1, keepdims=True)), LARGE),
    "two results": (lambda x: (jnp.exp(x), jnp.exp(x).sum(1)), LARGE),
    "cast": (lambda x: jnp.tanh(x.astype(jnp.bfloat16)), LARGE),
    "cast to float32": (lambda x: jnp.tanh(x.astype(jnp.float32)), f(512, 1024, dtype="bfloat16")),
    "squares of a cast": (lambda x: (x.astype(jnp.bfloat16) ** 2).mean(0), LARGE),
    "transpose": (lambda x: jnp.tanh(x.T) + 1.0, LARGE),
    "pooling": (lambda x: jnp.tanh(x.mean(0)), LARGE),
    "sum of two": (lambda x, y: jnp.tanh(x + y), LARGE, LARGE),
    "squares": (lambda x, y: ((x - y) ** 2).mean(), LARGE, LARGE),
    "scaled by a sum": (lambda x, y: jnp.tanh(x.sum()) * y, LARGE, LARGE),
    "scaled by rows": (lambda x, y: jnp.tanh(x.sum(1))[:, None] * y, LARGE, LARGE),
    "centred by another": (lambda x, y: y - x.sum(), LARGE, f(1024, 512)),
    "a mean of differences": (lambda x, y: (y - x.mean()).sum(), LARGE, LARGE),
    "a product and another": (lambda x, y, z: x * y + z, LARGE, LARGE, LARGE),
    "joined with a maximum": (lambda x, y: jnp.max(x, 1)[:, None] - y, LARGE, LARGE),
    "choice by one of two": (lambda x, y: jnp.where(x > 0, x, y), LARGE, LARGE),
    "choice by a sum": (lambda x, y: chosen(-x.T, y.sum()), LARGE, LARGE),
    "first rows": (lambda x, y: x[:64].reshape(-1)[:, None] * y, f(512), f(64, 1024)),
    "bias": (lambda x, b: jnp.tanh(x + b), LARGE, VECTOR),
    "gain": (lambda x, g: x * (1 + g), LARGE, VECTOR),
    "recurrence": (lambda x, y, b: jnp.tanh(x + y + b), LARGE, LARGE, VECTOR),
    "cross entropy": (lambda x, y: (jnp.log(jnp.exp(x).sum(1)) - (x * y).sum(1)).mean(), LARGE, LARGE),
}


def body_of(name: str) -> Body:
    fn, *args = FORMS[name]
    return close(jax.make_jaxpr(fn)(*args))


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", FORMS)
def test_no_plan_of_separate_equations_is_faster(name: str, training: bool) -> None:
    assert not list(lost(body_of(name), Prices(ONE_AXIS, training=training)))


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", ["cast", "cast to float32", "squares of a cast"])
def test_no_plan_of_separate_equations_is_faster_where_narrow_sums_are_sent_in_their_own_type(name: str, training: bool) -> None:
    assert not list(lost(body_of(name), Prices(ONE_AXIS, training=training, rounded=True), undivided=True))


@pytest.mark.parametrize("name", ["rows of exp", "pooling", "cast", "transpose"])
def test_no_plan_of_separate_equations_is_faster_on_two_axes(name: str) -> None:
    assert not list(lost(body_of(name), Prices(TWO_AXES)))


def halved(x: Any) -> Any:
    return x[:, :512] * x[:, 512:]


@pytest.mark.parametrize(
    "fn", [lambda x, y: halved(x * y), lambda x, y: jnp.cumsum(x * y, 1)], ids=["gate of halves", "running sum"]
)
def test_no_plan_of_separate_equations_that_moves_values_is_faster(fn: Callable[..., Any]) -> None:
    """Wherever values move, to other slices or whole: an operator moves the product, which is smaller than its operands."""
    body = close(jax.make_jaxpr(fn)(LARGE, LARGE))
    assert not list(lost(body, Prices(ONE_AXIS), INSIDE | {"PP", "PR", "PU"}))
    rows, columns = partitioned(0), partitioned(1)
    (choice,) = (c for c in choices_with_moves(body) if c.states == (columns, columns, rows))
    assert [(x.before, x.after) for x in choice.scattered if x.moves] == [(columns, rows)]


def test_separate_equations_that_scatter_sums_over_slices_are_faster() -> None:
    """The rows of one operand are summed over slices of its columns, and the sums are scattered to slices of the other's rows."""
    boundaries = [boundary for boundary, *_ in lost(body_of("scaled by rows"), Prices(ONE_AXIS), INSIDE | {"SP"})]
    assert (((partitioned(1),), (partitioned(0),)), ((partitioned(0),),)) in boundaries


def test_a_sum_of_two_partial_sums_is_scattered_once() -> None:
    for dim in (0, 1):
        boundary = (PARTIAL, PARTIAL, partitioned(dim))
        (choice,) = (c for c in choices(body_of("sum of two")) if c.states == boundary)
        assert [(x.before, x.after) for x in choice.scattered] == [(PARTIAL, partitioned(dim))]
        assert not choice.reduced


def rows(x: Any, fn: Callable[..., Any]) -> Any:
    return fn(x) if x.ndim else x


ONE: dict[str, Callable[[Any], Any]] = {
    "exp": jnp.exp, "tanh": jnp.tanh, "neg": jnp.negative, "scale": lambda x: 0.5 * x, "shift": lambda x: x + 1.0,
    "square": jnp.square, "half": lambda x: x.astype(jnp.bfloat16), "single": lambda x: x.astype(jnp.float32),
    "logsumexp": lambda x: rows(x, lambda x: jax.nn.logsumexp(x, -1, keepdims=True)),
    "rows": lambda x: rows(x, lambda x: x.sum(-1, keepdims=True)),
    "columns": lambda x: rows(x, lambda x: x.mean(0, keepdims=True)),
    "total": lambda x: rows(x, jnp.sum),
    "maximum": lambda x: rows(x, lambda x: x.max(-1, keepdims=True)),
    "stopped maximum": lambda x: rows(x, lambda x: lax.stop_gradient(x.max(-1, keepdims=True))),
    "transpose": jnp.transpose,
    "softmax": lambda x: rows(x, jax.nn.softmax),
    "centre": lambda x: rows(x, lambda x: x - x.mean(-1, keepdims=True)),
    "relu": jax.nn.relu,
}  # fmt: skip
TWO: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "where": lambda x, y: jnp.where(x > 0, x, y),
    "div": lambda x, y: x / (y * y + 1),
}  # fmt: skip


def drawn(seed: int) -> Iterator[Body]:
    """Yield the operators of 2 to 6 equations of a random program."""
    rng = random.Random(seed)
    shapes = [rng.choice([LARGE, LARGE, LARGE, VECTOR]) for _ in range(rng.randint(1, 3))]
    steps: list[tuple[Any, list[int]]] = []
    for k in range(rng.randint(2, 6)):
        several = rng.random() < 0.4
        latest = len(shapes) + k - 1
        read = [rng.randrange(latest + 1) if rng.random() < 0.5 else latest for _ in range(1 + several)]
        steps.append((rng.choice(list((TWO if several else ONE).values())), read))
    results = rng.randint(1, 2)

    def program(*values: Any) -> Any:
        found = list(values)
        for fn, read in steps:
            x, *others = (found[k] for k in read)
            others = [y if _fits(x, y) else y.sum() for y in others]
            found.append(fn(x, *others))
        return found[-results:]

    for node, _ in capture(program, *shapes).graph.walk():
        if node.body is not None and 2 <= len(node.body.equations) <= 6 and len(node.body.inputs) <= 3:
            yield node.body


def _fits(x: Any, y: Any) -> bool:
    try:
        return jnp.broadcast_shapes(x.shape, y.shape) is not None
    except ValueError:
        return False


@pytest.mark.parametrize(("count", "waists_moved"), [(3, 1), (5, 3), (9, 4), (65, 7)])
def test_of_the_waists_in_a_long_sum_those_of_twice_as_many_values_move(count: int, waists_moved: int) -> None:
    """The choices of a sum over the experts of a loop in Python grow with the logarithm of their number, not with its square."""
    body = close(jax.make_jaxpr(lambda *xs: sum(xs[1:], xs[0]))(*[f(4, 6)] * count))
    moving = [c for c in choices_with_moves(body, users=2) if c.moves and c.operands[0] == partitioned(0)]
    assert len({c.operands.index(partitioned(1)) for c in moving if partitioned(1) in c.operands}) == waists_moved


@pytest.mark.parametrize(("before", "after"), [*permutations((UNUSED, REPLICATED, PARTIAL, partitioned(0), partitioned(1)), 2)])
def test_changes_are_compared_by_the_bytes_of_their_collectives(before: State, after: State) -> None:
    tensor = tensor_type((8, 8), jnp.dtype("float32"))
    forward, both = (Prices(ONE_AXIS, training=t).change((before,), (after,), tensor, True) for t in (False, True))
    sent = [2 * nbytes / tensor.nbytes for nbytes in (forward, both - forward)]  # in copies: a device of two sends half of one
    if before.kind == after.kind == "P":
        assert sent == [0.5, 0.5]  # an all-to-all counts as a whole copy, so that no choice is left out too early
        sent = [1, 1]
    assert tuple(sent) == COPIES[before.kind + after.kind]


@settings(max_examples=fewer(30), derandomize=True)
@given(st.integers(0, 10**6), st.booleans())
def test_no_plan_of_separate_equations_of_random_operators_is_faster(seed: int, training: bool) -> None:
    for body in drawn(seed):
        assert not list(lost(body, Prices(ONE_AXIS, training=training))), seed


@settings(max_examples=fewer(30), derandomize=True)
@given(st.integers(0, 10**6))
def test_only_partial_sums_are_reduced_and_only_whole_values_contributed(seed: int) -> None:
    for body in (*drawn(seed), body_of("choice by a sum")):
        for choice in choices(body)[1:]:
            solution = along_axis(body, choice.operands, choice.results)
            assert solution is not None
            assert all(solution.states[v] == PARTIAL for v, kind in solution.reduced.items() if kind == "sum")
            whole = {a: solution.seen(a) for i, p in solution.contributed if isinstance(a := body.equations[i].operands[p], int)}
            assert all(s.kind == "R" for s in whole.values())


def test_a_sum_of_two_partial_sums_is_reduced_once() -> None:
    (choice,) = (c for c in choices(body_of("sum of two")) if c.operands == (PARTIAL, PARTIAL) and c.results == (UNUSED,))
    assert len(choice.reduced) == 1


def test_a_function_that_row_statistics_scale_is_divided_by_columns() -> None:
    """Where both operands are partial sums, an equation of its own could slice the statistics: one boundary is lost."""
    body = close(jax.make_jaxpr(lambda x, y: jax.nn.relu(jnp.tanh(x)) * y.mean(1, keepdims=True))(LARGE, LARGE))
    (choice,) = (c for c in choices(body) if c.operands == (partitioned(1), partitioned(1)) and c.results == (partitioned(1),))
    assert [r.nbytes for r in choice.reduced if r.kind] == [4 * 512]
    boundaries = [boundary for boundary, *_ in lost(body, Prices(ONE_AXIS))]
    assert boundaries == [(((PARTIAL,), (PARTIAL,)), ((partitioned(0),),))]


def test_a_partial_sum_is_reduced_where_it_is_smallest() -> None:
    body = body_of("pooling")
    (choice,) = (c for c in choices(body) if c.operands == (PARTIAL,) and c.results == (UNUSED,))
    assert [r.nbytes for r in choice.reduced] == [4 * 1024]
    body = body_of("scaled by rows")
    (choice,) = (c for c in choices(body) if c.operands == (partitioned(1), partitioned(1)))
    assert [r.nbytes for r in choice.reduced if r.kind] == [4 * 512]
