"""Programs of narrow types whose sums exceed their type, or cancel: plans are as near to the exact value as the program is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import one_in
from jax import lax

import unity
from benchmarks.fuzz.kinds import SLOW, ProgramCase, faults_of
from unity.machine.machine import Machine

pytestmark = pytest.mark.usefixtures("own_cache")
MACHINE = unity.Machine("slow", SLOW, Machine.grid(2, 2).levels)


def normal(*shape: int, dtype: str = "float32", scale: float = 1.0) -> Any:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape) * scale, dtype)


def attended(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Attention in float16 that fills its mask with the least float16, and scales its loss by 2**10."""
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / 4
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float16).min)
    return 1024 * (jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v).astype("float32") ** 2).mean()


def quantized(w: Any, x: Any) -> Any:
    """A product of float8 numbers with a scale for each tensor, as recipes for float8 training have it."""

    def narrow(x: Any, dtype: Any) -> Any:
        scale = lax.stop_gradient(jnp.abs(x).max()) / float(jnp.finfo(dtype).max)
        return (x / scale).astype(dtype), scale

    (a, s), (b, t) = narrow(x, jnp.float8_e4m3fn), narrow(w, jnp.float8_e4m3fn)
    y = lax.dot(a, b, preferred_element_type="float32") * s * t
    return jnp.square(y).mean()


def clipped(w: Any, x: Any) -> Any:
    """A gradient of float16, clipped by its norm, whose sum of squares is 100 times larger than any float16."""
    g = jax.grad(lambda w: (x @ w).astype("float32").sum())(w)
    norm = jnp.sqrt((g.astype("float32") ** 2).sum())
    return (g * jnp.minimum(1, 10 / norm).astype("float16") * w).sum()


def counted(table: Any, ids: Any, signs: Any) -> Any:
    """A sum of int8 numbers in int32, larger than any int8, and a histogram that is added up in bfloat16."""
    total = lax.dot(signs, table, preferred_element_type="int32")
    histogram = jnp.zeros(8, "float32").at[ids].add(1).astype("bfloat16")
    return total, jnp.sum(signs, 0), histogram, (signs.astype("bfloat16") * 0.5).sum()


def cancelled(w: Any, x: Any, y: Any) -> Any:
    """A difference of two nearly equal bfloat16 sums over all samples."""
    return ((x @ w).sum(0) - (y @ w).sum(0)).astype("float32").sum()


def normalized(s: Any, x: Any) -> Any:
    """A batch norm in float16 of numbers near 200, whose squares add up to more than 65504."""
    mean = x.mean(0)
    variance = jnp.mean(jnp.square(x - mean), 0)
    return ((x - mean) * lax.rsqrt(variance + 1e-3) * s).astype("float32").std()


MASK = np.tril(np.ones((8, 8), bool)) & (np.arange(8) > 0)  # the first row has nothing
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "masked attention": (attended, (*(normal(4, 8, 16, dtype="float16", scale=3) for _ in range(3)), MASK)),
    "float8 training": (quantized, (normal(16, 16), normal(32, 16, scale=100))),
    "clipped by norm": (clipped, (normal(64, 8, dtype="float16"), normal(32, 64, dtype="float16", scale=60))),
    "integers and a histogram": (
        counted,
        (normal(64, 8, scale=40).astype("int8"), np.arange(512) % 8, normal(16, 64, scale=50).astype("int8")),
    ),
    "cancelling sums": (
        cancelled,
        (normal(16, 8, dtype="bfloat16"), 100 + normal(64, 16, dtype="bfloat16"), 100 + normal(64, 16, dtype="bfloat16", scale=2)),
    ),
    "batch norm": (normalized, (jnp.ones(16, "float16"), 200 + normal(64, 16, dtype="float16"))),
}


@pytest.mark.parametrize("name", one_in(2, PROGRAMS))
def test_narrow_sums_are_those_of_one_device(name: str) -> None:
    fn, args = PROGRAMS[name]
    program = ProgramCase(fn, args, MACHINE, {} if name != "integers and a histogram" else {"training": False, "argnums": 0})
    assert faults_of(program, assigned=0, refusals=False) == []


def test_a_sum_of_squares_larger_than_float16_is_exact() -> None:
    w, x = jnp.ones((64, 8), "float16"), jnp.ones((32, 64), "float16")
    plan = unity.optimize(clipped, w, x, machine=MACHINE, progress=False)
    norm = 32 * np.sqrt(64 * 8)  # each element of the gradient is 32, for 32 samples of ones
    for point in (plan.frontier[0], plan.frontier[-1]):
        np.testing.assert_allclose(point(*point.shard(w, x)), 32 * 512 * 10 / norm, rtol=2e-3)
