"""Small functions of arrays with dimensions of 5, 7 and 9, which no machine of 2, 4 or 8 devices divides."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

IDS = np.array([[0, 8, 9, 12, -1, -9, -10], [100, -100, 3, 7, 9, 15, 16]])  # of a table of 9 rows: inside, and on all sides


def language_model(params: Any, tokens: jax.Array) -> jax.Array:
    x = params["table"][tokens] + params["position"]
    logits = jnp.tanh(x) @ params["table"].T + params["bias"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))


def perceptron(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = jax.nn.gelu(jax.nn.relu(x @ layer["w"] + layer["b"])) * layer["scale"]
    return x


def look_ups(table: jax.Array, ids: jax.Array) -> Any:
    rows = lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
    clipped = lax.gather(table, ids[..., None], rows, (1, 5), mode="clip")
    inside = lax.gather(table, ids[..., None], rows, (1, 5), mode="promise_in_bounds")
    filled = lax.gather(table, ids[..., None], rows, (1, 5), mode="fill", fill_value=3.0)
    return clipped, inside, filled, table[ids], jnp.take(table, ids, axis=0, mode="clip"), table[ids, 2 + ids % 2]


def narrow_look_ups(table: jax.Array, ids: jax.Array) -> Any:
    small = ids.astype(jnp.int8)
    return table[small], jnp.take(table, small.astype(jnp.uint8), axis=0), jnp.take(table, ids.astype(jnp.int64) << 32, axis=0)


def other_look_ups(table: jax.Array, ids: jax.Array) -> Any:
    """Windows that an index moves nowhere, rows of integers, and rows in another order."""
    windows = jax.vmap(lambda i: lax.dynamic_slice(table, (i, jnp.int32(0)), (2, 5)))(ids[0])
    order = jnp.argsort(table[:, 0])
    return windows, jnp.int32(9 * table)[ids], table[order], jax.scipy.special.zeta(2 + lax.stop_gradient(table) ** 2, 1.0)


def attention(params: Any, x: jax.Array) -> jax.Array:
    query, key, value = (jnp.einsum("bsd,dhk->bshk", x, params[name]) for name in ("query", "key", "value"))
    scores = jnp.einsum("bshk,bthk->bhst", query, key) / 2
    scores = jnp.where(jnp.tril(jnp.ones((7, 7), bool)), scores, -jnp.inf)
    return jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores), value).reshape(x.shape[0], 7, -1)


def reductions(w: jax.Array, x: jax.Array) -> Any:
    y = w * x
    ends = jnp.max(y, 0), jnp.min(y, 1), jnp.argmax(y, 1), jnp.any(y > 0, 0), jnp.all(y > -1, 1), jnp.max(jnp.int32(9 * x), 0)
    return (
        jnp.sum(y + 1),
        jnp.mean(y, 0),
        jnp.std(y, 1),
        jax.nn.logsumexp(y, 1),
        jnp.prod(y, 1),
        jnp.cumsum(y, 0),
        jnp.sort(y),
        ends,
    )


def singular_at_zero(w: jax.Array, x: jax.Array) -> Any:
    y = jnp.abs(w) + 1
    return jnp.log(y), jnp.sqrt(y), 1 / y, y ** (x * x), x / y, jnp.sum(y) / y[0], lax.rsqrt(y), jnp.arctan2(x, y)


def layer_norm(params: Any, x: jax.Array) -> jax.Array:
    centered = x - jnp.mean(x, -1, keepdims=True)
    scaled = centered * lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-6)
    return jax.nn.softplus(scaled * params["scale"] + params["shift"])


def convolution(params: Any, x: jax.Array) -> jax.Array:
    for kernel in params:
        x = jnp.tanh(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def experts(params: Any, x: jax.Array) -> jax.Array:
    gates = jax.nn.softmax(x @ params["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 7) * gates
    return jnp.einsum("be,ebf->bf", chosen, jnp.einsum("bd,edf->ebf", x, params["w"]))


def checkpointed(params: Any, x: jax.Array) -> jax.Array:
    block = jax.checkpoint(lambda w, x: jax.nn.relu(x @ w) @ w.T)
    x = block(params["a"], x) + x

    def step(carried: Any, w: jax.Array) -> Any:
        x, sums = jnp.tanh(carried[0] @ w), carried[1] + jnp.max(carried[0], 0)
        return (x, sums), jnp.exp(x) @ params["a"]

    (x, sums), rows = lax.scan(step, (x, jnp.zeros(9)), params["steps"])
    return jnp.reshape(x, (3, -1)), jnp.concatenate([x, x], 0), x[:, :4], x[::-1], sums, rows  # pyright: ignore[reportReturnType]


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        *(
            language_model,
            perceptron,
            look_ups,
            narrow_look_ups,
            other_look_ups,
            attention,
            reductions,
            singular_at_zero,
            layer_norm,
            convolution,
        ),
        *(experts, checkpointed),
    )
}
SHAPES: Mapping[str, tuple[Any, Any]] = {
    "language_model": ({"table": (9, 5), "position": (7, 5), "bias": (9,)}, None),
    "perceptron": ([{"w": (n, m), "b": (m,), "scale": (m,)} for n, m in ((5, 9), (9, 7), (7, 4))], (9, 5)),
    "look_ups": ((9, 5), None),
    "narrow_look_ups": ((9, 5), None),
    "other_look_ups": ((9, 5), None),
    "attention": ({name: (5, 9, 2) for name in ("query", "key", "value")}, (5, 7, 5)),
    "reductions": ((5, 9), (5, 9)),
    "singular_at_zero": ((5, 9), (5, 9)),
    "layer_norm": ({"scale": (9,), "shift": (9,)}, (5, 9)),
    "convolution": ([(3, 3, 5, 7), (3, 3, 7, 9)], (5, 4, 4, 5)),
    "experts": ({"gate": (5, 7), "w": (7, 5, 9)}, (9, 5)),
    "checkpointed": ({"a": (9, 5), "steps": (3, 9, 9)}, (9, 9)),
}


def arguments(name: str) -> tuple[Any, Any]:
    """Return weights and data of a function."""
    rng = np.random.default_rng(len(name))

    def normal(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape))

    weights, data = SHAPES[name]
    params = jax.tree.map(normal, weights, is_leaf=lambda x: isinstance(x, tuple))
    return params, jnp.asarray(IDS, jnp.int32) if data is None else normal(data)
