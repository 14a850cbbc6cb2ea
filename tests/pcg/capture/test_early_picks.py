"""Look-ups of single elements move before sums that nothing else reads: the same values and gradients, of fewer sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from serial_graph import evaluate

from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.search.cost.cost import Training
from unity.search.session import Search

Fn = Callable[[Any, Any], Any]


def picked(x: Any, y: Any) -> Any:
    return jnp.take_along_axis(x, y[..., None], -1)[..., 0]


def of_tokens(x: Any, y: Any) -> Any:
    x, y = x.reshape(2, 3, -1), y.reshape(2, 3)
    return -jnp.where(y > 1, picked(jax.nn.log_softmax(x), y), 0.0).sum()


def of_columns(x: Any, y: Any) -> Any:
    """The other dimension is looked up, so that rows are numbered by the second."""
    return jnp.take_along_axis(x.T - jnp.sin(x).sum(1), y[None], 0).sum()


def out_of_range(x: Any, y: Any) -> Any:
    """Labels of rows that do not count are often far out of range, where a look-up finds no number."""
    logs = picked(jax.nn.log_softmax(x), jnp.where(y > 1, y, 1000))
    return -jnp.where(y > 1, logs, 0.0).sum()


MOVED: dict[str, Fn] = {
    "log softmax": lambda x, y: -picked(jax.nn.log_softmax(x), y).mean(),
    "rows by number": lambda x, y: -jax.nn.log_softmax(x)[jnp.arange(len(x)), y].mean(),
    "vmap": lambda x, y: jax.vmap(lambda x, y: -jax.nn.log_softmax(x)[y])(x, y).mean(),
    "tokens": of_tokens,
    "columns": of_columns,
    "out of range": out_of_range,
    "scalar": lambda x, y: (picked(-(x - 2.0), y) ** 2).sum(),
    "narrow": lambda x, y: picked((x - x.max(1, keepdims=True)).astype(jnp.float32), y).sum().astype(x.dtype),
}
KEPT: dict[str, Fn] = {
    "other users": lambda x, y: (lambda logs: (picked(logs, y) + logs.sum(1)).sum())(jax.nn.log_softmax(x)),
    "products": lambda x, y: picked(x * jnp.exp(x).sum(1, keepdims=True), y).sum(),
    "of two tensors": lambda x, y: picked(x - jnp.sin(x), y).sum(),
    "one value for each column": lambda x, y: picked(x - jnp.sin(x).sum(0), y).sum(),
}


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(6, 5))), jnp.asarray([0, 4, 2, 2, 1, 3])


def read_sums(fn: Fn, x: Any, y: Any) -> list[int]:
    """How many equations read each result of arithmetic that a look-up of the same operator reads."""
    counts = []
    for node, _ in capture(fn, x, y).graph.walk():
        equations: tuple[Any, ...] = () if node.body is None else node.body.equations
        made = {v for e in equations if e.name in ("add", "mul", "neg", "sub") for v in e.results}
        tables = [e.operands[0] for e in equations if e.name == "gather"]
        counts += [sum(table in e.operands for e in equations) for table in tables if table in made]
    return counts


def assert_same(fn: Fn, x: Any, y: Any) -> None:
    graph = capture(fn, x, y).graph
    one, other = (jax.value_and_grad(f)(x, y) for f in (fn, lambda x, y: evaluate(graph, [x, y])[0]))
    assert np.isfinite(other[1]).all()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), one, other)


@pytest.mark.parametrize("name", MOVED)
def test_single_elements_are_looked_up_before_sums(name: str) -> None:
    with jax.enable_x64(True):
        assert 1 not in read_sums(MOVED[name], *data())
        assert_same(MOVED[name], *data())


@pytest.mark.parametrize("name", KEPT)
def test_other_look_ups_stay(name: str) -> None:
    with jax.enable_x64(True):
        assert read_sums(KEPT[name], *data())
        assert_same(KEPT[name], *data())


def filled(x: Any, y: Any) -> Any:
    """Labels out of range have a loss of zero."""
    return (jax.nn.log_softmax(x).at[jnp.arange(len(x)), y].get(mode="fill", fill_value=0) ** 2).sum()


BEYOND: dict[str, Fn] = {
    "clamped": lambda x, y: (jax.nn.log_softmax(x).at[jnp.arange(len(x)), y].get(mode="clip") ** 2).sum(),
    "promised": lambda x, y: (jax.nn.log_softmax(x)[jnp.arange(len(x)), y] ** 2).sum(),
    "no number": lambda x, y: picked(jax.nn.log_softmax(x), y).sum(),
    "filled": filled,
    "of a scalar": lambda x, y: ((x - x[0, 0])[jnp.arange(len(x)), y] ** 2).sum(),
    "in two dimensions": lambda x, y: picked((lambda z: z - z.max(2, keepdims=True))(x.reshape(2, 3, 5)), y.reshape(2, 3)).sum(),
}


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64"])
def test_indices_out_of_range_have_the_function_s_values_and_gradients(name: str, dtype: str) -> None:
    """JAX drops their gradients: the whole row's, where a sum of the row is looked up."""
    with jax.enable_x64(True):
        x, y = data()
        assert_same(BEYOND[name], x, y.at[jnp.array([0, 3])].set(jnp.array([7, 100 if dtype == "uint32" else -9])).astype(dtype))


def test_a_cross_entropy_takes_as_long_by_either_logarithm() -> None:
    """Of the log-soft-max, or of the sum of exponentials."""

    def by_logs(w: Any, x: Any, y: Any) -> Any:
        return -picked(jax.nn.log_softmax(x @ w), y).mean()

    def by_sums(w: Any, x: Any, y: Any) -> Any:
        return (jax.nn.logsumexp(x @ w, -1) - picked(x @ w, y)).mean()

    f = jax.ShapeDtypeStruct
    args = f((512, 32768), "float32"), f((8192, 512), "float32"), f((8192,), "int32")

    def time(fn: Callable[..., Any]) -> float:
        captured = capture(fn, *args)
        return Search(captured.graph, captured.differentiated, Machine.preset("dgx-h100-4x8"), Training()).fastest.time

    assert time(by_logs) == pytest.approx(time(by_sums), rel=1e-3)


def test_a_stopped_gradient_stays_stopped() -> None:
    with jax.enable_x64(True):
        assert_same(lambda x, y: picked(x - lax.stop_gradient(jnp.exp(x).sum(1, keepdims=True)), y).sum(), *data())


def test_gradients_of_an_element_that_is_picked_often_are_added_up_in_the_wide_type() -> None:
    """From 256 on, bfloat16 has no odd numbers."""
    x, y = jnp.ones((3, 512), "bfloat16"), jnp.zeros((3, 300), "int32")

    def fn(x: Any, y: Any) -> Any:
        wide = (x - x.max(1, keepdims=True)).astype(jnp.float32)
        return jnp.take_along_axis(wide, y, 1).sum()

    graph = capture(fn, x, y).graph
    gradient = jax.grad(lambda x, y: evaluate(graph, [x, y])[0])(x, y)
    np.testing.assert_array_equal(gradient, jax.grad(fn)(x, y))
