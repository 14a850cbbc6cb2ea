"""Transposed products have the layouts that the CPU runtime requires: every plan of them runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import ends, one_in
from jax import lax

import unity

pytestmark = pytest.mark.usefixtures("own_cache")

SLOW = unity.Device("slow", {"float32": 1e6, "float64": 1e6}, 10**9, 1e9, 0.5, 0.0)
MACHINE = replace(unity.Machine.grid(2, 2), device=SLOW)


def definite(y: Any) -> Any:
    return jnp.swapaxes(y, -1, -2).conj() @ y + jnp.eye(y.shape[-1])


# What XLA hands to functions of the CPU runtime or of LAPACK, of a product seen in another order of its dimensions.
RESTRICTED: dict[str, Callable[[Any], Any]] = {
    "fft of the first dimension": lambda y: jnp.abs(jnp.fft.fft(y[0], axis=0)),
    "fft of the second": lambda y: jnp.abs(jnp.fft.fft(y, axis=1)),
    "fft and back": lambda y: jnp.abs(jnp.fft.ifft(jnp.fft.fft(y.reshape(-1, y.shape[-1]), axis=0), axis=1)),
    "fft of two": lambda y: jnp.abs(jnp.fft.fft2(y, axes=(0, 2))),
    "rfft": lambda y: jnp.abs(jnp.fft.rfft(y.real, axis=1)),
    "irfft": lambda y: jnp.fft.irfft(y, axis=1),
    "eigh": lambda y: jnp.linalg.eigvalsh(definite(y.swapaxes(0, 2))),
    "cholesky": lambda y: jnp.abs(jnp.linalg.cholesky(definite(y.swapaxes(0, 2)))),
    "solve": lambda y: jnp.abs(jnp.linalg.solve(definite(y.swapaxes(0, 1)), y.swapaxes(0, 1).mT)),
    "triangular_solve": lambda y: jnp.abs(lax.linalg.triangular_solve(definite(y.swapaxes(0, 1)), y.swapaxes(0, 1))),
    "qr": lambda y: jnp.abs(jnp.linalg.qr(definite(y.swapaxes(0, 2)))[1]),
    "svd": lambda y: jnp.linalg.svd(y.swapaxes(0, 2), compute_uv=False),
    "sort": lambda y: jnp.sort(y.real.swapaxes(0, 1), axis=0) * jnp.arange(1.0, y.shape[1] + 1)[:, None, None],
    "top_k": lambda y: lax.top_k(y.real.swapaxes(0, 2), 2)[0],
    "cumulative": lambda y: jnp.cumsum(y.real.swapaxes(0, 2), axis=1),
    "convolution": lambda y: lax.conv_general_dilated(
        y.real.swapaxes(0, 2), jnp.ones((3, y.shape[0], 4)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    ),
}


@pytest.mark.parametrize("name", one_in(2, RESTRICTED))
def test_every_plan_of_a_transposed_product_runs(name: str) -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        w, x = (jnp.asarray(rng.normal(size=s) + 1j * rng.normal(size=s)) for s in ((6, 8), (4, 12, 6)))

        def loss(w: Any, x: Any) -> Any:
            return jnp.sum(RESTRICTED[name](x @ w) ** 2)

        wanted = jax.jit(jax.value_and_grad(loss))(w, x)
        plan = unity.optimize(loss, w, x, machine=MACHINE, progress=False, budget=0)
        for point in ends(plan.frontier):
            found = jax.jit(jax.value_and_grad(point))(*point.shard(w, x))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-7), found, wanted)


def test_parts_of_an_exchange_have_one_layout() -> None:
    """XLA's CPU backend gave the parts of an all-to-all beside products of small matrices different layouts, and refused them."""

    def loss(w: Any, x: Any) -> Any:
        products = lax.associative_scan(jnp.matmul, jnp.tanh(x[..., None] * w), axis=1)
        return products[:, -1].sum() + (jnp.abs(products).mean((0, 1)) * jnp.arange(64.0).reshape(8, 8)).sum()

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        args = jnp.asarray(rng.normal(size=(8, 8))), jnp.asarray(rng.normal(size=(4, 16, 8)))
        machine = unity.Machine.grid(1, 8, replace(SLOW, bandwidth=1e6, efficiency=1.0), intra=(1e12, 1e-12), inter=(1e12, 1e-12))
        plan = unity.optimize(loss, *args, argnums=(0, 1), machine=machine, progress=False)
        found, wanted = (jax.jit(jax.grad(f))(*args) for f in (plan, loss))
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


def test_parts_of_the_cotangents_of_an_exchange_have_one_layout() -> None:
    """The same in the backward pass of stages, where a product is exchanged together with a constant."""

    def loss(p: Any, x: Any, y: Any) -> Any:
        for i, w in enumerate(p):
            x = jnp.tanh(x @ w) * (1 + 0.1 * i) + (x if w.shape[0] == w.shape[1] else 0)
        m = y >= 0
        return -(jnp.take_along_axis(jax.nn.log_softmax(x), jnp.maximum(y, 0)[:, None], 1)[:, 0] * m).sum() / m.sum()

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        weights = [jnp.asarray(rng.normal(size=s) / 3) for s in ((6, 8), (8, 8), (8, 12), (12, 5))]
        args = weights, jnp.asarray(rng.normal(size=(16, 6))), jnp.asarray(rng.integers(-1, 5, 16))
        machine = unity.Machine.grid(2, 4, replace(SLOW, bandwidth=1e6, efficiency=1.0), intra=(1e12, 1e-12), inter=(1e12, 1e-12))
        shape = unity.PipelineShape(2, 4, "gpipe")
        plan = unity.optimize(loss, *args, machine=machine, progress=False, pipeline=shape, pack=True)
        found, wanted = (jax.jit(jax.grad(f))(*args) for f in (plan, loss))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), found, wanted)
