"""Where memory is scarce, GPUs compute the gradients of a product's operands together; values and all derivatives are unchanged."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import MODELS, arrays

import unity
from unity.machine.machine import Machine

MACHINE = Machine.grid(1, 4, "h100")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are those for GPUs, though they run on a CPU."""
    monkeypatch.setattr("unity.exec.lowering.platform_of", lambda mesh: "gpu")


def barriers(fn: Any, *args: Any) -> int:
    return len(re.findall(r"optimization_barrier", jax.jit(fn).lower(*args).as_text()))


def net(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w["a"]) @ w["b"])


def case() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return {"a": rng.normal(size=(8, 16)), "b": rng.normal(size=(16, 4))}, rng.normal(size=(8, 8))


def planned(fn: Any, *args: Any, scarce: float = 1.01, **options: Any) -> Any:
    """A plan under a limit of so many times the memory that the fastest needs."""
    plan = unity.optimize(fn, *args, machine=MACHINE, progress=False, search="captured", **options)
    limit = scarce * plan.memory
    return unity.optimize(fn, *args, machine=MACHINE, progress=False, search="captured", memory_limit=limit, **options)


def test_every_product_with_two_gradients_has_one_barrier(gpus: None) -> None:
    w, x = case()
    assert barriers(jax.grad(planned(net, w, x)), w, x) == 1  # of the first product only the weight has a gradient
    assert barriers(jax.grad(planned(net, w, x, argnums=(0, 1)), (0, 1)), w, x) == 2
    assert barriers(planned(net, w, x), w, x) == 0  # of the forward pass


def test_on_cpus_there_are_none() -> None:
    w, x = case()
    assert barriers(jax.grad(planned(net, w, x)), w, x) == 0


def test_nor_where_there_is_memory_for_late_gradients(gpus: None) -> None:
    w, x = case()
    assert barriers(jax.grad(planned(net, w, x, scarce=1.5)), w, x) == 1
    assert barriers(jax.grad(planned(net, w, x, scarce=1.7)), w, x) == 0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_values_and_gradients_are_the_functions(gpus: None, name: str) -> None:
    with jax.enable_x64(True):
        model = MODELS[name]()
        plan = planned(model.loss, model.params, model.batch)
        params, batch = arrays(model.params), arrays(model.batch)
        got, wanted = (jax.jit(jax.value_and_grad(f))(params, batch) for f in (plan.frontier[-1], model.loss))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-10), got, wanted)


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (jax.tree.map(jnp.cos, w),)),
        lambda f: lambda w, x: jax.jvp(lambda w: jax.grad(f)(w, x), (w,), (jax.tree.map(jnp.cos, w),)),
        lambda f: lambda w, x: jax.grad(lambda w: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f)(w, x))))(w),
        lambda f: lambda w, x: jax.vmap(jax.grad(f), (0, None))(jax.tree.map(lambda a: jnp.stack([a, 2 * a]), w), x),
    ],
    ids=["forward", "forward over reverse", "reverse over reverse", "batched"],
)
def test_all_derivatives_are_the_functions(gpus: None, derivative: Any) -> None:
    with jax.enable_x64(True):
        w, x = case()
        plan = planned(net, w, x)
        got, wanted = (jax.jit(derivative(f))(w, x) for f in (plan, net))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12), got, wanted)
