"""Arrays that devices reduce in the rules of a custom_vjp, such as the scales of quantized cotangents."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand
from test_agreed import SLOW

import unity
from unity.base.errors import PlanError
from unity.pcg.ir.program import close
from unity.pcg.parallel.traffic import traffic
from unity.pcg.propagation.choices import choices
from unity.pcg.propagation.nested.agreements import RulePass
from unity.pcg.propagation.solver import replicable
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, partitioned
from unity.search.cost.prediction import predict

GRID = unity.Machine.grid(2, 4, SLOW.device, intra=(1e9, 1e-9), inter=(1e9, 1e-9))


def quantized(x: Any, axis: int) -> tuple[Any, Any]:
    """Return 8-bit integers and their scales, one for each element of the other dimension, as qwix computes them."""
    scale = jnp.max(jnp.abs(x), axis, keepdims=True) / 100
    return jnp.round(x / scale).astype(jnp.int8), scale


def product(x: Any, y: Any) -> Any:
    """Return the product of two matrices that are quantized along the dimension that is summed."""
    (a, s), (b, t) = quantized(x, 1), quantized(y, 0)
    return jax.lax.dot(a, b, preferred_element_type=jnp.int32).astype(x.dtype) * s * t


@jax.custom_vjp
def quantized_product(x: Any, w: Any) -> Any:
    return product(x, w)


def _backward(residuals: Any, g: Any) -> Any:
    x, w = residuals
    return product(g, w.T), product(x.T, g)


quantized_product.defvjp(lambda x, w: (product(x, w), (x, w)), _backward)


def arguments() -> list[Any]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((32, 16), (16, 64), (64, 16))]


def loss(x: Any, first: Any, second: Any) -> Any:
    return jnp.mean(quantized_product(jnp.tanh(quantized_product(x, first)), second) ** 2)


def test_a_rule_that_quantizes_is_divided_along_each_factor() -> None:
    x, w, _ = arguments()
    body = close(jax.make_jaxpr(quantized_product)(x, w))
    found = {c.operands: c for c in choices(body)}
    rows, columns = found[partitioned(0), REPLICATED], found[REPLICATED, partitioned(1)]
    assert rows.results == (partitioned(0),)
    assert columns.results == (partitioned(1),)
    reduced = [(x.run, x.agreement.kind, x.agreement.elements) for x in rows.arrays if x.agreement.kind]
    assert sorted(reduced, key=str) == [(RulePass.BACKWARD, "max", 16), (RulePass.BACKWARD, "max", 64)]  # scales of x.T and of g
    assert (REPLICATED, REPLICATED) not in found
    assert not any(PARTIAL in c.operands for c in found.values())


@pytest.mark.parametrize(("machine", "argnums"), [(SLOW, (0, 1, 2)), (GRID, (1, 2)), *by_hand((SLOW, (2,)), (GRID, (2,)))])
def test_a_quantized_network_is_planned_and_right(machine: unity.Machine, argnums: tuple[int, ...]) -> None:
    args = arguments()
    plan = unity.optimize(loss, *args, machine=machine, argnums=argnums, rules=(), progress=False)
    prediction = predict(plan.program.pcg, plan.inspect.machine, plan.program.family.differentiated)
    assert not [t.node for t in prediction.operators if t.share == 1 and t.node.kind == "custom_vjp"]
    assert any(c.elements > 1 and c.node.kind == "custom_vjp" for c in traffic(plan.program.pcg, argnums))
    actual = jax.jit(jax.value_and_grad(plan, argnums))(*plan.shard(*args))
    expected = jax.jit(jax.value_and_grad(loss, argnums))(*args)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5), actual, expected)
    assert plan.check().agrees()
    assert plan.time == pytest.approx(prediction.time, rel=1e-6)


def test_a_second_derivative_through_a_maximum_over_devices_is_refused() -> None:
    args = arguments()
    plan = unity.optimize(loss, *args, machine=SLOW, rules=(), progress=False)

    def slope(x: Any) -> Any:
        return jnp.sum(jax.grad(plan, 1)(x, *args[1:]) ** 2)

    with pytest.raises(PlanError, match="maximum over devices"):
        jax.grad(slope)(args[0])


def wrapped_sum(x: Any) -> Any:
    return jnp.sum((x * 2**20).astype(jnp.int32), 1).astype(jnp.float32)


def wrapped_product(x: Any) -> Any:
    a = (x * 2**9).astype(jnp.int32)
    return jax.lax.dot(a, a.T).astype(jnp.float32)


ruled_sum, ruled_product = jax.custom_vjp(wrapped_sum), jax.custom_vjp(wrapped_product)
ruled_sum.defvjp(lambda x: (wrapped_sum(x), x), lambda x, g: (wrapped_sum(x)[:, None] * g[:, None] * jnp.ones_like(x),))
ruled_product.defvjp(lambda x: (wrapped_product(x), x), lambda x, g: (wrapped_product(x) @ g @ x,))


@pytest.mark.parametrize("fn", [ruled_sum, ruled_product, wrapped_sum, wrapped_product])
def test_a_sum_of_integers_that_wraps_around_is_complete_before_it_is_converted(fn: Any) -> None:
    x = jnp.asarray(np.random.default_rng(0).uniform(4, 8, (16, 1024)), jnp.float32)
    sums, products = (np.asarray(x * scale).astype(np.int64) for scale in (2**20, 2**9))
    assert min(np.min(np.sum(sums, 1)), np.min(products @ products.T)) > 2**31
    ruled = hasattr(fn, "defvjp")
    run = (lambda f, *args: jax.value_and_grad(f)(*args)) if ruled else (lambda f, *args: f(*args))

    def total(x: Any) -> Any:
        return jnp.sum(jnp.tanh(fn(jnp.abs(x)) / 2.0**31))

    plan = unity.optimize(total, x, machine=GRID, training=ruled, rules=(), progress=False)
    expected = run(total, x)
    for point in plan.frontier:
        actual = run(point, point.shard(x))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), actual, expected)


@pytest.mark.parametrize(("terms", "divided"), [(2**17 - 1, True), (2**17, False)])
def test_products_of_integers_are_converted_before_they_are_added_only_if_no_sum_overflows(terms: int, divided: bool) -> None:
    def converted(a: Any, b: Any) -> Any:
        return jax.lax.dot(a, b, preferred_element_type=jnp.int32).astype(jnp.float32)

    a, b = jax.ShapeDtypeStruct((4, terms), jnp.int8), jax.ShapeDtypeStruct((terms, 4), jnp.int8)
    body = close(jax.make_jaxpr(converted)(a, b))
    found = [c for c in choices(body) if c.operands == (partitioned(1), partitioned(0))]
    assert any(c.results == (PARTIAL,) for c in found) == divided


@pytest.mark.parametrize(
    ("operand", "result", "linear"),
    [("int8", "int32", False), ("int4", "int8", False), ("uint4", "int4", True), ("uint32", "int32", True)],
)
def test_a_product_reads_partial_sums_of_integers_only_if_it_wraps_around_as_early(operand: str, result: str, linear: bool) -> None:
    a, b = jax.ShapeDtypeStruct((4, 8), operand), jax.ShapeDtypeStruct((8, 4), operand)
    body = close(jax.make_jaxpr(partial(jax.lax.dot, preferred_element_type=jnp.dtype(result)))(a, b))
    assert any(PARTIAL in c.operands for c in choices(body)) == linear


@jax.custom_vjp
def gated(x: Any, w: Any) -> Any:
    return jnp.tanh(2 * (x @ w))


def _gated_backward(kept: Any, g: Any) -> Any:
    x, w = kept
    slope = g * jnp.tanh(jnp.sum(g)) * (1 - jnp.tanh(2 * (x @ w)) ** 2)
    return jnp.tanh(2 * (slope @ w.T)), x.T @ slope


gated.defvjp(lambda x, w: (gated(x, w), (x, w)), _gated_backward)


def test_reduced_sums_in_rules_are_counted_on_two_axes() -> None:
    args = arguments()

    def loss(x: Any, first: Any, second: Any) -> Any:
        return jnp.mean(gated(gated(x, first), second) ** 2)

    plan = unity.optimize(loss, *args, machine=GRID, argnums=(0, 1, 2), rules=(), progress=False)
    expected = jax.value_and_grad(loss, (0, 1, 2))(*args)
    for point in plan.frontier[:: max(1, len(plan.frontier) // 4)]:
        actual = jax.jit(jax.value_and_grad(point, (0, 1, 2)))(*point.shard(*args))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-6), actual, expected)
        assert point.check().agrees()
        assert point.time == pytest.approx(
            predict(point.program.pcg, plan.inspect.machine, point.program.family.differentiated).time
        )


def test_an_array_is_counted_in_the_slices_that_another_axis_divides_it_into() -> None:
    args = jnp.ones((2, 4096)), jnp.ones((4096, 8))
    placed = jax.sharding.PartitionSpec("n0", ("d0", "d1"))
    fast_memory = replace(GRID, device=replace(GRID.device, bandwidth=1e12))
    options: Any = {"machine": fast_memory, "argnums": 0, "rules": (), "progress": False}
    plan = unity.optimize(lambda x, w: jnp.mean(gated(x, w) ** 2), *args, constraints=[unity.pin("x", placed)], **options)
    inside = [(c.axes, c.elements) for c in traffic(plan.program.pcg, (0,)) if c.node.kind == "custom_vjp" and c.elements > 1]
    assert ((1, 2), 2 * 8 // 2) in inside
    assert plan.check().agrees()


def test_a_call_whose_rule_reduces_a_number_is_not_replicated_for_use() -> None:
    assert not replicable(close(jax.make_jaxpr(gated)(jnp.ones((8, 16)), jnp.ones((16, 4)))))
