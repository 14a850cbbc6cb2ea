"""Functions that JAX keeps as one equation are planned as what they compute: divided, with their derivatives, and exported."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import one_in
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from test_aliased import MACHINE

import unity
from unity.explain.tables import blocked

W, X = jnp.eye(32) + 0.1, jnp.linspace(-1.0, 2.0, 64 * 32).reshape(64, 32)


def norm(x: Any) -> Any:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def ruled(optimize: bool, batching: bool) -> Callable[[Any], Any]:
    """Return a function with a custom rule, like the operators of tokamax."""
    forward = lambda x: jax.vjp(norm, x)  # noqa: E731
    if batching:
        forward = jax.custom_batching.custom_vmap(forward)
        forward.def_vmap(lambda n, b, x: (jax.vmap(lambda x: jax.vjp(norm, x))(x), True))
    call = jax.custom_vjp(norm)
    call.defvjp(forward, lambda pull, ct: pull(ct), optimize_remat=optimize)
    return call


@jax.custom_gradient
def clipped(x: Any) -> Any:
    return jnp.sin(x), lambda ct: (jnp.clip(ct, -1e-3, 1e-3),)


@jax.custom_batching.sequential_vmap
def sequential(x: Any) -> Any:
    return jnp.tanh(x)


def rooted(x: Any) -> Any:
    def newton(f: Any, x0: Any) -> Any:
        return lax.fori_loop(0, 8, lambda _, y: y - f(y) / (3 * y * y + 1), x0)

    return lax.custom_root(lambda y: y**3 + y - x, jnp.zeros_like(x), newton, lambda g, y: y / g(jnp.ones_like(y)))


def solved(x: Any) -> Any:
    diagonal = 2.0 + x * x
    return lax.custom_linear_solve(lambda y: diagonal * y, x, lambda _, b: b / diagonal, symmetric=True)


def named(x: Any) -> Any:
    return checkpoint_name(jnp.tanh(x), "kept")


def still(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function with a stopped gradient, since JAX cannot differentiate it."""
    return lambda x: x * fn(lax.stop_gradient(x))


def batched(x: Any) -> Any:
    call = jax.custom_batching.custom_vmap(jnp.tanh)
    call.def_vmap(lambda n, b, x: (jnp.tanh(x), True))
    return jax.vmap(call)(call(x))


POLICIES = jax.checkpoint_policies
CASES: dict[str, Callable[[Any], Any]] = {
    "a rule": ruled(False, False),
    "a rule with batching": ruled(False, True),
    "a rule, optimized": ruled(True, False),
    "a rule with batching, optimized": ruled(True, True),
    "a custom gradient": clipped,
    "custom batching": still(batched),
    "sequential batching": still(sequential),
    "batched sequentially": still(jax.vmap(sequential)),
    "a named call": jax.named_call(jnp.tanh, name="named"),
    "a composite": still(lax.composite(lambda x: jnp.tanh(x), "my.tanh")),
    "a barrier": lambda x: lax.optimization_barrier((jnp.tanh(x), x))[0],
    "a choice of platforms": lambda x: lax.platform_dependent(x, cpu=jnp.tanh, default=jnp.sin),
    "a root": rooted,
    "a linear solve": solved,
    "names that are kept": jax.checkpoint(named, policy=POLICIES.save_only_these_names("kept")),
    "a converted closure": lambda x: (lambda pair: pair[0](x, *pair[1]))(jax.closure_convert(lambda y: jnp.tanh(y) * X.mean(), x)),
}


def loss(fn: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.sin(fn(x @ w / 32)).mean()


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_values_gradients_and_exports_equal_those_of_the_function(name: str, tmp_path: Path) -> None:
    fn = loss(CASES[name])
    plan = unity.optimize(fn, W, X, machine=MACHINE, search="captured", progress=False)
    assert blocked(plan) == []
    wanted = jax.jit(jax.value_and_grad(fn))(W, X)
    plan.files.export(tmp_path / "exported.py")
    spec = importlib.util.spec_from_file_location("exported", tmp_path / "exported.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for run in (plan, module.fn):
        for a, b in zip(jax.jit(jax.value_and_grad(run))(W, X), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("batching", [False, True])
def test_an_optimized_rule_is_divided_as_it_is_without(batching: bool) -> None:
    plans = [
        unity.optimize(loss(ruled(optimize, batching)), W, X, machine=MACHINE, search="captured", progress=False)
        for optimize in (False, True)
    ]
    assert plans[0].time == plans[1].time
    assert [n.types for n in plans[0].program.pcg.nodes] == [n.types for n in plans[1].program.pcg.nodes]
