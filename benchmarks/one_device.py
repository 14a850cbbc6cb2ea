"""Algebra alone: rewritten programs on one device against `jax.jit` of the function as it is, run in turns.

`python -m benchmarks.one_device`. Value and gradients of a step. Above 1 the rewritten program is faster; where nothing is
rewritten, because nothing is predicted to pay or what is predicted measured slower, both are the same program.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = ""
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")

import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import unity
from benchmarks.record import asked, record, show

ROUNDS = 15


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def low_rank(p: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ p["a"] @ p["b"]) ** 2)


def heads(p: Any, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, p[n]) for n in "qkv")
    s = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k))
    return jnp.mean(jnp.einsum("bhqs,bshk->bqhk", s, v) ** 2)


def summed(p: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ p["a"] + x @ p["b"]) ** 2)


def branches(p: Any, x: jax.Array) -> jax.Array:
    def conv(w: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y)

    return jnp.mean(jnp.concatenate([conv(p[n]) for n in "abcd"], -1) ** 2)


def many_small(p: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.concatenate([jnp.tanh(x @ w) for w in p], -1) ** 2)


CASES: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "(x A) B, low rank out": (low_rank, {"a": f(512, 2048), "b": f(2048, 16)}, f(4096, 512)),
    "q, k, v of one input": (heads, {n: f(256, 4, 64) for n in "qkv"}, f(8, 128, 256)),
    "x A + x B": (summed, {"a": f(512, 512), "b": f(512, 512)}, f(2048, 512)),
    "four 1x1 convolutions joined": (branches, {n: f(1, 1, 64, 32) for n in "abcd"}, f(8, 32, 32, 64)),
    "eight narrow layers joined": (many_small, [f(256, 16)] * 8, f(4096, 256)),
}


def measured(case: str) -> dict[str, Any]:
    fn, params, x = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        started = time.perf_counter()
        plan = unity.optimize(fn, params, x, progress=False)
        seconds = time.perf_counter() - started
    rng = np.random.default_rng(0)
    given = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 8, s.dtype), (params, x))
    steps = [jax.jit(jax.value_and_grad(g)) for g in (fn, plan)]
    for step in steps:
        jax.block_until_ready(step(*given))
    rounds = [[_seconds(step, given) for step in steps] for _ in range(ROUNDS)]
    applied = [f"{times} × {way}" for way, times in plan.program.rewriting.applied]
    return {
        "case": case,
        "jit ms": median(a for a, _ in rounds) * 1e3,
        "unity ms": median(b for _, b in rounds) * 1e3,
        "jit / unity": median(a / b for a, b in rounds),
        "optimize s": seconds,
        "applied": ", ".join(applied),
    }


def _seconds(step: Callable[..., Any], given: Any) -> float:
    started = time.perf_counter()
    jax.block_until_ready(step(*given))
    return time.perf_counter() - started


def main() -> None:
    cases, whole = asked(__doc__, CASES)
    rows = [measured(case) for case in cases]
    show("one device", rows)
    if whole:
        record("one_device", rows)


if __name__ == "__main__":
    main()
