"""Programs with control flow whose predicates depend on divided data: no plan hangs, and each computes what the program does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand
from jax import lax

import unity
from benchmarks.fuzz.kinds import SLOW, ProgramCase, faults_of
from unity.machine.machine import Machine

pytestmark = pytest.mark.usefixtures("own_cache")
MACHINE = unity.Machine("slow", SLOW, Machine.grid(2, 2).levels)


def normal(*shape: int, seed: int = 0) -> Any:
    return (np.random.default_rng([seed, *shape]).normal(size=shape) / np.sqrt(shape[-1])).astype("float32")


def scaled_step(params: Any, scale: Any, x: Any, y: Any) -> Any:
    """A step with dynamic loss scaling: an update only where all gradients, of all devices, are finite."""

    def one(state: Any, batch: Any) -> Any:
        w, scale = state
        value, g = jax.value_and_grad(lambda w: scale * ((jnp.tanh(batch[0] @ w) - batch[1]) ** 2).mean())(w)
        fine = jnp.isfinite(g).all() & (jnp.abs(g).max() < 3e4)
        return lax.cond(fine, lambda: (w - 0.1 * g / scale, scale * 2), lambda: (w, scale / 4)), value

    (w, scale), values = lax.scan(one, (params, scale), (x, y))
    return (w * w).sum() + values.mean() / scale


def early_exit(ws: Any, out: Any, x: Any) -> Any:
    """Layers until the whole batch has settled, which all devices must agree on."""

    def body(state: Any) -> Any:
        k, h, _ = state
        new = jnp.tanh(h @ lax.dynamic_index_in_dim(ws, k % 4, keepdims=False))
        return k + 1, new, jnp.abs(new - h).max()

    k, h, _ = lax.while_loop(lambda s: (s[0] < 12) & (s[2] > 0.05), body, (0, x, jnp.float32(1)))
    return jax.nn.log_softmax(lax.stop_gradient(h) @ out).mean() * k


def decoded(table: Any, out: Any, first: Any) -> Any:
    """Greedy decoding until every sample of the batch has its end, of which each device has some."""

    def body(state: Any) -> Any:
        k, tokens, last, done = state
        last = jnp.where(done, 0, jnp.argmax(table[last] @ out + k * jnp.eye(8)[0] / 4, -1))
        return k + 1, tokens.at[:, k].set(last), last, done | (last == 0)

    start = (0, jnp.full((16, 6), -1), first, jnp.zeros(16, bool))
    k, tokens, _, done = lax.while_loop(lambda s: (s[0] < 6) & ~s[3].all(), body, start)
    return tokens, done, k


def solved(w: Any, b: Any) -> Any:
    """Conjugate gradients, whose loop ends by a norm over all devices, and whose gradient is another such loop."""
    a = w @ w.T + jnp.eye(16)
    x, _ = jax.scipy.sparse.linalg.cg(lambda v: a @ v, b, tol=1e-6, maxiter=40)
    return (x * jnp.arange(16.0)).sum() + (x * x).sum()


def routed(ws: Any, gate: Any, x: Any, y: Any) -> Any:
    """In every layer one of three branches for the whole batch, by the experts that the batch likes best."""

    def layer(h: Any, w: Any) -> Any:
        best = jnp.argmax(jax.nn.softmax(h @ gate).mean(0))
        branches = [lambda h: jnp.tanh(h @ w), lambda h: h - jax.nn.softmax(h @ w, 0), lambda h: jnp.sin(h) - h.mean(0)]
        return lax.switch(best, branches, h), best

    h, chosen = lax.scan(jax.checkpoint(layer), x, ws)
    return ((h - y) ** 2).mean() + 0.0 * chosen.sum()


def ignoring(ws: Any, out: Any, x: Any, target: Any) -> Any:
    """A pipeline whose tail normalizes by what counts in the whole batch, after a conditional on weights."""
    h = lax.scan(lambda h, w: (lax.cond(w[0, 0] > 0, jnp.tanh, jnp.sin, h @ w), None), x, ws)[0]
    picked = jnp.take_along_axis(jax.nn.log_softmax(h @ out), jnp.maximum(target, 0)[:, None], -1)[:, 0]
    return -(picked * (target >= 0)).sum() / jnp.maximum((target >= 0).sum(), 1)


TARGET = np.array([3, -1, 0, 7, -1, -1, 2, 5] * 2)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "dynamic loss scaling": (scaled_step, (normal(8, 8), np.float32(1e4), normal(6, 16, 8), normal(6, 16, 8)), {}),
    "early exit": (early_exit, (normal(4, 8, 8), normal(8, 8), normal(16, 8)), {}),
    "greedy decoding": (decoded, (3 * normal(8, 8), normal(8, 8, seed=2), np.arange(16) % 8), {"training": False, "argnums": 0}),
    "conjugate gradients": (solved, (normal(16, 16), normal(16)), {}),
    "a branch for the batch": (routed, (normal(3, 8, 8), normal(8, 3), normal(16, 8), normal(16, 8)), {}),
    **{
        f"a tail that counts, {kind}": (
            ignoring,
            (normal(4, 8, 8), normal(8, 8), normal(16, 8), TARGET),
            {"pipeline": unity.PipelineShape(2, 4, kind)},
        )
        for kind in ("1f1b", *by_hand("gpipe"))
    },
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_devices_that_decide_together_compute_what_one_does(name: str) -> None:
    fn, args, options = PROGRAMS[name]
    program = ProgramCase(fn, args, MACHINE, options)
    assert faults_of(program, assigned=0, refusals=False) == []
