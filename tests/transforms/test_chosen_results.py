"""Programs of some results alone compute the same, and read only what these depend on, through calls, branches and loops."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unity.pcg.capture.capture import capture
from unity.pcg.local.interpreter import run_body
from unity.transforms.chosen_results import inputs_read, with_results

A, B, N = jnp.arange(4.0), jnp.float32(0.5), jnp.int32(3)


def apart(a: Any, b: Any, n: Any) -> Any:
    return jnp.sin(a) * b, b * 0.9, n + 1


def ruled(a: Any, b: Any, n: Any) -> Any:
    call = jax.custom_vjp(apart)
    call.defvjp(lambda *args: (apart(*args), None), lambda _, g: (g[0], g[1], None))
    return call(a, b, n)


def conditional(a: Any, b: Any, n: Any) -> Any:
    return lax.cond(n > 2, apart, lambda a, b, n: (a + n, b * 2, n * 2), a, b, n)


def scanned(a: Any, b: Any, n: Any) -> Any:
    """The last carry is read by the second one after one step, and by the first one after two. Each step leaves results."""

    def step(carry: Any, row: Any) -> Any:
        x, y, k = carry
        return (x + y, y * k, k + 1), (x * row, row + 1)

    (x, y, k), (rows, others) = lax.scan(step, (a.sum(), b, n), jnp.stack([a, 2 * a]), reverse=True)
    return x, y, k, rows, others


def looped(a: Any, b: Any, n: Any) -> Any:
    return lax.while_loop(lambda c: c[2] < 9, lambda c: apart(*c), (a, b, n))


ALL = [0, 1, 2]
READ: dict[str, tuple[Callable, list[list[int]]]] = {  # for each result the arguments that it reads
    "checkpoint": (jax.checkpoint(apart), [[0, 1], [1], [2]]),
    "two checkpoints": (jax.checkpoint(jax.checkpoint(apart)), [[0, 1], [1], [2]]),
    "rule": (ruled, [ALL, ALL, [2]]),
    "rule in a checkpoint": (jax.checkpoint(ruled), [ALL, ALL, [2]]),
    "cond": (conditional, [ALL, [1, 2], [2]]),
    "scan": (scanned, [ALL, [1, 2], [2], ALL, [0]]),
    "scan in a checkpoint": (jax.checkpoint(scanned), [ALL, [1, 2], [2], ALL, [0]]),
    "while": (looped, [ALL, ALL, ALL]),
}


@pytest.mark.parametrize("kind", READ)
def test_results_read_what_they_depend_on(kind: str) -> None:
    fn, wanted = READ[kind]
    body = capture(fn, A, B, N).body
    results = fn(A, B, N)
    types = [()] * len(results)
    chosen = [[k] for k in range(len(results))] + [[len(results) - 1, 0]]
    for numbers in chosen:
        part = with_results(body, numbers)
        assert inputs_read(part) == sorted({p for k in numbers for p in wanted[k]})
        run = jax.jit(partial(run_body, part, types=types[:3], results=types[: len(numbers)], axes=()))
        found = run([x if p in inputs_read(part) else jnp.full_like(x, 77) for p, x in enumerate((A, B, N))])
        for k, x in zip(numbers, found, strict=True):
            np.testing.assert_allclose(x, results[k], rtol=1e-6)
