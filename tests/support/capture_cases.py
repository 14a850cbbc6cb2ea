"""Functions with something that a capture could trip over. Each takes the arrays beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TRAPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}


def trap(*args: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        TRAPS[fn.__name__] = (fn, args)
        return fn

    return register


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


X = numbers(8, 16)
TABLE = numbers(64, 16, seed=1)


@trap(X, jax.random.key(3))
def typed_key(x, key):
    keep = jax.random.bernoulli(jax.random.fold_in(key, 2), 0.5, x.shape)
    return jnp.where(keep, x, 0).sum(), jax.random.split(key)


@trap(X, np.array([0, 7], np.uint32))
def raw_key(x, key):
    for _ in range(4):
        key, now = jax.random.split(key)
        x = x * jax.random.uniform(now, x.shape)
    return x, key


@trap(X)
def fixed_key(x):
    noise = jax.random.normal(jax.random.key(0), x.shape)
    return x + noise, x * noise


@trap({"w": X, "hole": None, "rest": [(), TABLE]}, X)
def holes(params, x):
    assert params["hole"] is None
    return {"y": x @ params["w"].T, "none": None, "t": params["rest"][1].sum()}


class State(NamedTuple):
    mean: Any
    var: Any


@trap(numbers(16), State(np.zeros(16, np.float32), np.ones(16, np.float32)), X)
def batch_statistics(gain, state, x):
    mean, var = jnp.mean(x, 0), jnp.var(x, 0)
    y = jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5) * gain)
    return jnp.sum(y**2), State(0.9 * state.mean + 0.1 * mean, 0.9 * state.var + 0.1 * var)


@trap(np.arange(12, dtype=np.int32).reshape(3, 4), np.array([True, False, True]))
def integers(x, flags):
    return jnp.where(flags[:, None], x % 5, x // 3), jnp.sum(flags), x.astype(jnp.int8) << 1


@trap(X.astype(jnp.bfloat16), X)
def bfloat(x, y):
    return (x @ y.T.astype(jnp.bfloat16)).astype(jnp.float32).mean(), x.sum(dtype=jnp.float32)


@trap((X[:, :8] + 1j * X[:, 8:]).astype(np.complex64))
def complex_numbers(x):
    return jnp.abs(jnp.fft.ifft(jnp.fft.fft(x) * x.conj())), x.real, x.imag


@trap(X)
def real_fft(x):
    return jnp.fft.irfft(jnp.fft.rfft(x, axis=-1), axis=-1)


@trap(X)
def while_loop(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))


@trap(X)
def conditional(x):
    return lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, x), lax.switch(1, [jnp.sin, jnp.cos], x)


@trap(numbers(3, 16, 16), X)
def scan(ws, x):
    def step(c, w):
        y = jnp.tanh(c @ w)
        return y, (y.sum(), jnp.float32(1))

    return lax.scan(step, x, ws)


@trap(numbers(16, 16), X)
def scan_with_constants_and_dead_carry(w, x):
    def step(c, _):
        a, dead, k = c
        return (jnp.tanh(a @ w + TABLE[:8]), dead + 1, k), None

    return lax.scan(step, (x, jnp.zeros(()), jnp.float32(2)), None, length=3, reverse=True)[0][0]


@trap(numbers(16, 16), X)
def remat_with_policy(w, x):
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def layer(w, x):
        return jnp.sin(x @ w) @ w

    return layer(w, layer(w, x))


@trap(X)
def closes_over_arrays(x):
    @jax.jit
    def inner(x):
        return x @ TABLE.T + jnp.asarray(TABLE)[:8, :1]

    return inner(x) + inner(x * 2), x + TABLE[:8]


@trap(X)
def dead_code(x):
    _ = jnp.linalg.inv(x @ x.T)
    _ = jax.random.normal(jax.random.key(1), (4,))
    return x.sum()


@trap(X, numbers(3))
def outputs_that_are_inputs(x, y):
    return x, y, x, x + 1


@trap(X)
def outputs_that_are_literals(x):
    return 3.0, jnp.zeros(4), jnp.arange(3), True, x.sum(), jnp.float32(2) * 3


@trap(X)
def duplicated_outputs(x):
    y = x * 2
    return y, y, y.sum(), y.sum()


@trap(np.arange(4))
def nothing_differentiable(x):
    return x + 1


@trap(np.zeros((0, 4), np.float32), X)
def zero_size(x, y):
    return x.sum(), jnp.concatenate([x, x]), y[:, :0] @ jnp.zeros((0, 3))


@trap(np.float32(3), 2.0, 1)
def scalars(x, y, k):
    return x * y + k, jnp.power(x, k)


@jax.custom_vjp
def clip_gradient(x, scale):
    return x


clip_gradient.defvjp(lambda x, s: (x, s), lambda s, g: (jnp.clip(g, -1, 1) * s, None))


@trap(X)
def custom_rules(x):
    @jax.custom_jvp
    def smooth(x):
        return jnp.sign(x)

    smooth.defjvp(lambda p, t: (jnp.sign(p[0]), t[0]))
    return smooth(x).sum() + jax.nn.relu(clip_gradient(x, 2.0)).sum(), jax.nn.silu(x), jax.nn.logsumexp(x, -1)


@trap(X, np.array([3, 1, 60]))
def indexing(x, i):
    t = jnp.asarray(TABLE)
    return t[i], t.at[i].add(1.0), lax.dynamic_slice(x, (i[1], 0), (2, 4)), jnp.take_along_axis(x, i[None, :] % 16, 1)


@trap(X)
def sorting(x):
    return jnp.sort(x, -1), lax.top_k(x, 3), jnp.argmax(x, -1), jnp.cumsum(x, 0)


@trap(numbers(2, 8, 8, 3), numbers(3, 3, 3, 4))
def convolution(x, k):
    y = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return lax.reduce_window(y, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@trap(X)
def named_axis(x):
    def normalize(row):
        return (row - lax.pmean(row, "rows")) / (1e-3 + lax.pmax(jnp.abs(row), "rows")), lax.psum(1, "rows")

    return jax.vmap(normalize, axis_name="rows")(x)


@trap(X)
def nested_jits(x):
    @jax.jit
    def outer(x):
        @jax.jit
        def middle(x):
            return jax.jit(jnp.sin)(x) * 2

        return middle(x) + middle(x)

    return outer(outer(x))


@trap(X)
def gradient_inside(x):
    return jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2))(x), jax.jvp(jnp.sin, (x,), (x,))


@trap(X)
def callbacks_without_effects(x):
    return jax.pure_callback(lambda x: np.sin(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x).sum()
