"""Second derivatives of calls with derivative rules: those of the function, or a refusal."""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from precision import in_64_bits

import unity
from unity.base.errors import PlanError

SLOW = unity.Device("slow", {"float32": 1e6, "float64": 1e6}, 2**30, 1e7, 1.0, 0.0)
TWO = unity.Machine.grid(1, 2, SLOW, intra="nvlink3", inter="ib-hdr")
X = np.random.default_rng(0).normal(size=(4, 6))


@pytest.fixture(autouse=True)
def _in_64_bits() -> Iterator[None]:
    with in_64_bits():
        yield


def scaled(by: float) -> Callable[[Any], Any]:
    """Return tanh with a rule, which calls it again, that is its derivative times a factor."""
    call = jax.custom_vjp(jnp.tanh)
    call.defvjp(lambda x: (call(x), x), lambda x, g: (by * g * (1 - jnp.tanh(x) ** 2),))
    return call


def rounded() -> Callable[[Any], Any]:
    """Return a straight-through estimator, whose rule calls it again."""
    call = jax.custom_jvp(lambda x: jnp.round(x))
    call.defjvp(lambda primals, tangents: (call(*primals), *tangents))
    return call


def attention() -> Callable[[Any], Any]:
    """Return a function whose rule calls one of JAX's own with a rule."""

    def plain(x: Any) -> Any:
        return jax.nn.softmax(x * x, -1) * x

    call = jax.custom_vjp(plain)
    call.defvjp(lambda x: jax.vjp(plain, x), lambda pull, g: pull(g))
    return call


def curvature(f: Callable[[Any], Any], x: Any) -> Any:
    """Return the product of a Hessian and a vector."""
    return jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), jnp.arange(24.0).reshape(4, 6))))(x)


def planned(call: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], unity.Plan]:
    def loss(x: Any) -> Any:
        return jnp.sum(call(x) ** 2 * x)

    return loss, unity.optimize(loss, X, machine=TWO, search="captured", progress=False)


def in_file(plan: unity.Plan, folder: Path) -> Callable[[Any], Any]:
    """Return the function of a plan's file."""
    plan.files.export(folder / "exported.py")
    return runpy.run_path(str(folder / "exported.py"), run_name="exported")["fn"]


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("call", [scaled(1.0), attention()], ids=["calls itself", "calls another"])
def test_rules_that_call_derivatives_are_differentiated_again(call: Callable, divided: bool, tmp_path: Path) -> None:
    loss, plan = planned(call if divided else lambda x: jnp.sort(call(x).ravel()[::-1]).reshape(x.shape))
    for fn in (plan, in_file(plan, tmp_path)):
        np.testing.assert_allclose(curvature(fn, plan.shard(X)), curvature(loss, X), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("call", [scaled(3.0), rounded()], ids=["vjp", "jvp"])
def test_rules_that_call_other_rules_are_differentiated_once(call: Callable, tmp_path: Path) -> None:
    loss, plan = planned(call)
    x, exported = plan.shard(X), in_file(plan, tmp_path)
    assert x.sharding.shard_shape(x.shape) != x.shape
    for fn in (plan, exported):
        np.testing.assert_allclose(jax.grad(fn)(x), jax.grad(loss)(X), rtol=1e-10)
    with pytest.raises(PlanError, match=r"test_second_derivatives.py:\d+.*a second derivative"):
        curvature(plan, x)
    for second in (curvature, lambda f, x: jax.hessian(f)(x), lambda f, x: jax.jvp(jax.grad(f), (x,), (x,))):
        with pytest.raises(NotImplementedError, match="a second derivative"):
            second(exported, x)


@pytest.mark.parametrize(("function", "refused"), [(jnp.round, True), (jnp.tanh, False)])
def test_rules_of_wide_partial_sums_are_checked(function: Callable, refused: bool, tmp_path: Path) -> None:
    """Their operators are differentiated again as their programs, so the rule itself must be the program's derivative."""

    @jax.custom_jvp
    def call(x: Any, w: Any) -> Any:
        return function(x * w)

    def derivative(primals: Any, tangents: Any) -> Any:
        product, change = jax.jvp(jnp.multiply, primals, tangents)
        return function(product), change * (1 if refused else 1 - jnp.tanh(product) ** 2)

    call.defjvp(derivative)

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(call(x, w) ** 2 * x)

    x, w = (jnp.asarray(np.random.default_rng(k).normal(size=size), jnp.bfloat16) for k, size in ((0, (4, 6)), (1, (6,))))
    pins = [unity.pin("x", P("device")), unity.pin("w", P())]
    plan = unity.optimize(loss, x, w, argnums=(0, 1), machine=TWO, search="captured", constraints=pins, progress=False)

    def curvature_of(fn: Callable) -> Any:
        return jax.jit(jax.grad(lambda w: jnp.vdot(jax.grad(fn, 1)(x, w), jnp.arange(6.0, dtype=w.dtype))))(w)

    for fn, error in ((plan, PlanError), (in_file(plan, tmp_path), NotImplementedError)):
        if refused:
            with pytest.raises(error, match="a second derivative"):
                curvature_of(fn)
        else:
            np.testing.assert_allclose(curvature_of(fn).astype(float), curvature_of(loss).astype(float), rtol=0.1, atol=0.2)


def test_a_rule_is_held_against_a_function_without_derivative() -> None:
    """A fixed point by a loop, which has no reverse-mode derivative but by its rule."""

    def plain(x: Any) -> Any:
        return jax.lax.while_loop(lambda y: jnp.any(jnp.abs(y - jnp.cos(y) - x) > 1e-13), lambda y: jnp.cos(y) + x, x)

    call = jax.custom_vjp(plain)
    call.defvjp(lambda x: (lambda y: (y, y))(call(x)), lambda y, g: (g / (1 + jnp.sin(y)),))
    _, plan = planned(lambda x: call(x / 8))
    with pytest.raises(PlanError, match="a second derivative"):
        curvature(plan, plan.shard(X))


def test_a_function_of_positive_numbers_is_compared_there() -> None:
    """Its rule and its program are NaN together at half of all random numbers."""
    root = jax.custom_jvp(lambda x: jnp.sqrt(x))
    root.defjvp(lambda primals, tangents: (root(*primals), tangents[0] / (2 * root(*primals))))
    loss, plan = planned(lambda x: root(1 + x * x))
    wanted, computed = (curvature(f, x) for f, x in ((loss, X), (plan, plan.shard(X))))
    np.testing.assert_allclose(computed, wanted, rtol=1e-10, atol=1e-10)


def test_a_rule_that_differs_for_negative_numbers_alone_is_refused() -> None:
    leaky = jax.custom_jvp(lambda x: jnp.maximum(x, 0))
    leaky.defjvp(lambda primals, tangents: (leaky(*primals), tangents[0] * jnp.where(primals[0] > 0, 1, 0.1)))
    _, plan = planned(leaky)
    with pytest.raises(PlanError, match="a second derivative"):
        curvature(plan, plan.shard(X))
