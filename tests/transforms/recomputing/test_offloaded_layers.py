"""Layers whose products are offloaded so that a program fits: chosen where that is faster, with the function's values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precision import in_64_bits
from small_models import Small, arrays, f

import unity
from unity.plan.plan import Plan

LAYERS, PART = 6, 0.7  # of the memory of the leanest plan that recomputes no layer
DEVICE = unity.Device("slow", {"float32": 1e9}, 2**30, 1e9, 1.0, 1e-6)
MACHINE = unity.Machine.grid(1, 4, DEVICE, intra=(1e9, 1e-6), inter=(1e9, 1e-6), host=(1e11, 0.0))


@pytest.fixture(autouse=True, scope="module")
def in_float64() -> Iterator[None]:
    with in_64_bits():
        yield


def layer(x: Any, p: Any) -> Any:
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def written_out() -> Small:
    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = layer(x, p)
        return jnp.mean(x**2)

    return Small(loss, [{"up": f(16, 64), "down": f(64, 16)}] * LAYERS, f(2048, 16))


def scanned() -> Small:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)[0] ** 2)

    return Small(loss, {"up": f(LAYERS, 16, 64), "down": f(LAYERS, 64, 16)}, f(2048, 16))


MODELS = {"written out": written_out, "scanned": scanned}


def planned(model: Small, **options: Any) -> Plan:
    options = {"machine": MACHINE, "budget": 0, "pipelines": False, "branches": False, "progress": False, **options}
    return unity.optimize(model.loss, model.params, model.batch, **options)


def limited(name: str, **options: Any) -> Plan:
    """A plan that must recompute layers."""
    model = MODELS[name]()
    limit = PART * planned(model, objective="memory", recompute=False).memory
    return planned(model, memory_limit=limit, **options)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_products_are_offloaded_where_the_link_is_fast_and_values_stay(name: str) -> None:
    recomputed, plan = limited(name), limited(name, offload=True)
    assert plan.time < recomputed.time
    assert plan.program.recomputing is not None
    assert plan.program.recomputing.saved == "offloaded products"
    assert "which are offloaded" in str(plan.program.recomputing)
    model = MODELS[name]()
    args = arrays(model.params), arrays(model.batch)
    expected = jax.value_and_grad(model.loss)(*args)
    result = jax.jit(jax.value_and_grad(plan))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), result, expected)
    assert plan.check().agrees(0.02)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_plan_with_offloaded_layers_is_saved_and_exported(name: str, tmp_path: Path) -> None:
    model, plan = MODELS[name](), limited(name, offload=True)
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", model.loss, model.params, model.batch)
    assert (again.program.pcg.key, again.time, again.memory) == (plan.program.pcg.key, plan.time, plan.memory)
    plan.files.export(tmp_path / "exported.py")
    assert "offload_dot_with_no_batch_dims" in (tmp_path / "exported.py").read_text()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_nothing_is_offloaded_over_a_slow_link(name: str) -> None:
    slow = dataclasses.replace(MACHINE, host=unity.HostLink(1e6))
    recomputed, plan = limited(name, machine=slow), limited(name, machine=slow, offload=True)
    assert plan.program.pcg.key == recomputed.program.pcg.key


def test_a_machine_without_a_link_offloads_nothing_and_says_so() -> None:
    unlinked = dataclasses.replace(MACHINE, host=None)
    with pytest.warns(UserWarning, match="offload=True: nothing is offloaded, since slow-1x4 has no link"):
        plan = limited("scanned", machine=unlinked, offload=True)
    assert plan.program.pcg.key == limited("scanned", machine=unlinked).program.pcg.key
