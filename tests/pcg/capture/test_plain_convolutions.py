"""Convolutions pad images themselves, and take dimensions in any order: values, gradients and plans stay what they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from serial_graph import evaluate

import unity
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG

LAST = ("NHWC", "HWIO", "NHWC")
VALID = [(0, 0), (0, 0)]


def primitives(graph: PCG) -> list[str]:
    return [name for node, _ in graph.walk() if node.body is not None for name in node.body.primitives]


def arrays(*shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def assert_same(fn: Callable[..., Any], graph: PCG, *args: Any) -> None:
    def total(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: jnp.sin(run(*args)).sum()

    numbers = tuple(range(len(args)))
    one, other = (jax.value_and_grad(total(f), numbers)(*args) for f in (fn, lambda *args: evaluate(graph, list(args))[0]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), one, other)


@given(st.permutations(range(4)), st.permutations(range(4)), st.permutations(range(4)), st.sampled_from([1, 2]), st.booleans())
@settings(max_examples=fewer(15), deadline=None)
def test_transposes_around_convolutions_vanish(
    image: Sequence[int], filters: Sequence[int], result: Sequence[int], stride: int, pads: bool
) -> None:
    def fn(w: Any, x: Any) -> Any:
        x, w = x.transpose(image), w.transpose(filters)
        x = jnp.pad(x, ((0, 0), (2, 1), (0, 1), (0, 0))) if pads else x
        y = lax.conv_general_dilated(x, w, (stride, 1), [(1, 0), (0, 2)], rhs_dilation=(1, 2), dimension_numbers=LAST)
        return y.transpose(result)

    with jax.enable_x64(True):
        x, w = arrays((2, 6, 7, 4), (2, 3, 4, 5))
        x, w = (v.transpose(np.argsort(order)) for v, order in ((x, image), (w, filters)))
        graph = capture(fn, w, x).graph
        assert not {"transpose", "pad"}.intersection(primitives(graph))
        assert_same(fn, graph, w, x)


def padded_and_scaled(w: Any, x: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), VALID, dimension_numbers=LAST) * x[0, 1, 1, 0]


ABSORBED: dict[str, Callable[[Any, Any], Any]] = {
    "groups": lambda w, x: lax.conv_general_dilated(
        jnp.pad(x, ((0, 0), (1, 1), (0, 2), (0, 0))), w[:, :, :2], (1, 1), VALID, dimension_numbers=LAST, feature_group_count=2
    ),
    "twice": lambda w, x: lax.conv_general_dilated(
        jnp.pad(jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, 0))), ((0, 0), (1, 1), (2, 0), (0, 0))), w, (1, 1), "SAME",
        dimension_numbers=LAST,
    ),
    "beside other users": lambda w, x: padded_and_scaled(w, jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))),
}  # fmt: skip
KEPT: dict[str, Callable[[Any, Any], Any]] = {
    "ones": lambda w, x: lax.conv_general_dilated(
        jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=1.0), w, (1, 1), VALID, dimension_numbers=LAST
    ),
    "samples": lambda w, x: lax.conv_general_dilated(
        jnp.pad(x, ((1, 0), (1, 1), (1, 1), (0, 0))), w, (1, 1), VALID, dimension_numbers=LAST
    ),
    "cropped": lambda w, x: lax.conv_general_dilated(
        lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (-1, 2, 0), (0, 0, 0), (0, 0, 0))), w, (1, 1), VALID, dimension_numbers=LAST
    ),
    "put apart": lambda w, x: lax.conv_general_dilated(
        jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), w, (1, 1), VALID, lhs_dilation=(2, 1), dimension_numbers=LAST
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ABSORBED)
def test_padding_by_zeros_is_the_convolutions_own(name: str) -> None:
    with jax.enable_x64(True):
        x, w = arrays((2, 6, 7, 4), (2, 3, 4, 6))
        graph = capture(ABSORBED[name], w, x).graph
        (convolution,) = (n for n in graph.nodes if n.kind == "conv_general_dilated")
        assert convolution.operands[0].node.kind == "input"
        assert_same(ABSORBED[name], graph, w, x)


@pytest.mark.parametrize("name", KEPT)
def test_other_padding_stays(name: str) -> None:
    with jax.enable_x64(True):
        x, w = arrays((2, 6, 7, 4), (2, 3, 4, 6))
        graph = capture(KEPT[name], w, x).graph
        assert "pad" in primitives(graph)
        assert_same(KEPT[name], graph, w, x)


def test_a_plan_of_a_padded_convolution_computes_what_the_function_does() -> None:
    """Devices divide the padded dimension, whose edges they exchange."""

    def loss(w: Any, x: Any) -> Any:
        x = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        return jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), VALID).transpose(0, 2, 3, 1)).sum()

    with jax.enable_x64(True):
        w, x = arrays((4, 3, 3, 3), (1, 3, 16, 5))
        plan = unity.optimize(loss, w, x, machine=Machine.grid(1, 4, "a100"), search="captured", progress=False)
        wanted = jax.value_and_grad(loss)(w, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), jax.value_and_grad(plan)(w, x), wanted)


FIRST = ("NCHW", "OIHW", "NCHW")


def convolved(x: Any, w: Any, layout: tuple[str, str, str]) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), [(1, 1), (1, 1)], dimension_numbers=layout)


def turned(x: Any, w: Any) -> Any:
    return convolved(x, w, LAST).transpose(0, 3, 1, 2)


BETWEEN: dict[str, Callable[..., Any]] = {
    "one transpose": lambda w, v, x: convolved(turned(x, w), v, FIRST),
    "two transposes": lambda w, v, x: convolved(turned(x, w).transpose(0, 1, 3, 2), v, FIRST),
    "padding": lambda w, v, x: convolved(jnp.pad(turned(x, w), ((0, 0), (0, 0), (1, 0), (0, 2))), v, FIRST),
    "two readers": lambda w, v, x: convolved(y := turned(x, w), v, FIRST) + convolved(y, v * 2, FIRST),
    "read besides": lambda w, v, x: convolved(y := turned(x, w), v, FIRST) + jnp.sin(y).sum(),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_a_convolution_reads_what_another_one_computes_in_another_order(name: str) -> None:
    with jax.enable_x64(True):
        args = arrays((3, 3, 3, 4), (5, 4, 3, 3), (2, 6, 6, 3))
        graph = capture(BETWEEN[name], *args).graph
        assert_same(BETWEEN[name], graph, *args)
