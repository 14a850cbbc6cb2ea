"""RWKV-7 (Peng et al. 2025): linear attention, whose state follows a generalized delta rule. Sizes are those of its 1.5B model.

No layer reads the values of the first one, as all but the first do in the published model.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .llama import product
from .losses import cast, cross_entropy
from .model import Model, Tree, f32, i32
from .stack import scanned, unrolled
from .transformer import layer_norm, norm_params

MIXED = ("receptance", "decay", "key", "value", "rate", "gate")
"""What is computed from a mixture of each token with the one before it."""
LOW_RANK = ("decay", "rate", "gate")
FASTEST = -math.exp(-0.5)
"""The least logarithm of a decay."""


def rwkv7(
    *,
    layers: int = 24,
    hidden: int = 2048,
    head: int = 64,
    rank: int = 128,
    vocab: int = 65536,
    seq: int = 1024,
    batch: int = 64,
    scan: bool = False,
    remat: bool = False,
    compute: str = "bfloat16",
) -> Model:
    """Mean cross-entropy of the next token; `scan`, `remat` and `compute` as for GPT.

    Args:
        head: The width of a head, whose state is a square matrix.
        rank: The rank of the products that compute decays, rates and gates.
    """
    dtype, stack = jnp.dtype(compute), scanned if scan else unrolled

    def block(params: Tree, x: jax.Array) -> jax.Array:
        params = cast(params, dtype)
        x = x + _time_mix(params["time"], layer_norm(params["norm1"], x), head)
        return x + _channel_mix(params["channel"], layer_norm(params["norm2"], x))

    def loss(params: Tree, data: Tree) -> jax.Array:
        x = params["token"]["table"].astype(dtype)[data["tokens"]]
        x = stack.apply(jax.checkpoint(block) if remat else block, params["blocks"], x)
        x = layer_norm(cast(params["norm"], dtype), x)
        logits = jnp.matmul(x, params["head"]["weight"].astype(dtype), preferred_element_type=jnp.float32)
        return cross_entropy(logits, data["labels"])

    square, vector = {"weight": f32(hidden, hidden)}, {"gain": f32(hidden)}
    narrow = {"down": {"weight": f32(hidden, rank)}, "up": {"weight": f32(rank, hidden)}, "bias": f32(hidden)}
    time = {
        "mix": {name: vector for name in MIXED},
        **dict.fromkeys(("receptance", "key", "value", "out"), square),
        **dict.fromkeys(LOW_RANK, narrow),
        **dict.fromkeys(("removal", "replacement", "bonus"), vector),
        "norm": norm_params(hidden),
    }
    channel = {"mix": vector, "up": {"weight": f32(hidden, 4 * hidden)}, "down": {"weight": f32(4 * hidden, hidden)}}
    one = {"norm1": norm_params(hidden), "time": time, "norm2": norm_params(hidden), "channel": channel}
    params = {
        "token": {"table": f32(vocab, hidden)},
        "blocks": stack.params(one, layers),
        "norm": norm_params(hidden),
        "head": {"weight": f32(hidden, vocab)},
    }
    data = {"tokens": i32(batch, seq), "labels": i32(batch, seq)}
    return Model("rwkv7", loss, params, data, below={"tokens": vocab, "labels": vocab})


def delta_rule(
    receptance: jax.Array, decay: jax.Array, key: jax.Array, value: jax.Array, removal: jax.Array, rate: jax.Array
) -> jax.Array:
    """Return what a state returns that forgets, and moves towards new values: all [batch, time, heads, width], as the result.

    s[t] = s[t-1] (diag(decay[t]) - removal[t] (rate[t] removal[t])ᵀ) + value[t] key[t]ᵀ, y[t] = s[t] receptance[t].
    """

    def step(state: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        r, w, k, v, z, a = now  # [batch, heads, width]; the state has values and keys as the last dimensions
        removed = jnp.einsum("bhvk,bhk->bhv", state, z)
        state = state * w[:, :, None] - removed[..., None] * (a * z)[:, :, None] + v[..., None] * k[:, :, None]
        return state, jnp.einsum("bhvk,bhk->bhv", state, r)

    samples, _, heads, width = value.shape
    over = tuple(jnp.swapaxes(x.astype(jnp.float32), 0, 1) for x in (receptance, decay, key, value, removal, rate))
    _, outputs = lax.scan(step, jnp.zeros((samples, heads, width, width)), over)
    return jnp.swapaxes(outputs, 0, 1).astype(value.dtype)


def _time_mix(params: Tree, x: jax.Array, head: int) -> jax.Array:
    before = _before(x)
    mixed = {name: x + (before - x) * params["mix"][name]["gain"] for name in MIXED}
    r, k, v = (product(name, params, mixed[name]) for name in ("receptance", "key", "value"))
    decay = jnp.exp(FASTEST * jax.nn.sigmoid(_narrow(params["decay"], mixed["decay"], jnp.tanh).astype(jnp.float32)))
    rate = jax.nn.sigmoid(_narrow(params["rate"], mixed["rate"]))
    gate = _narrow(params["gate"], mixed["gate"], jax.nn.sigmoid)

    def split(y: jax.Array) -> jax.Array:
        return y.reshape(*y.shape[:2], -1, head)

    removal = split(k * params["removal"]["gain"]).astype(jnp.float32)
    removal = removal * lax.rsqrt(jnp.sum(jnp.square(removal), axis=-1, keepdims=True) + 1e-12)
    k = k * (1 + (rate - 1) * params["replacement"]["gain"])
    y = delta_rule(split(r), split(decay), split(k), split(v), removal, split(rate))
    y = _group_norm(params["norm"], y).reshape(x.shape)
    bonus = jnp.sum(split(r * k * params["bonus"]["gain"]), axis=-1, keepdims=True) * split(v)
    return product("out", params, (y + bonus.reshape(x.shape)) * gate)


def _channel_mix(params: Tree, x: jax.Array) -> jax.Array:
    mixed = x + (_before(x) - x) * params["mix"]["gain"]
    return product("down", params, jnp.square(jax.nn.relu(product("up", params, mixed))))


def _narrow(params: Tree, x: jax.Array, between: Callable[[jax.Array], jax.Array] = lambda y: y) -> jax.Array:
    """A product of low rank, with a function between its factors."""
    return product("up", params, between(product("down", params, x))) + params["bias"]


def _before(x: jax.Array) -> jax.Array:
    """The token before each one, zeros before the first. [batch, time, channels] -> the same."""
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def _group_norm(params: Tree, y: jax.Array) -> jax.Array:
    """Normalize each head. [batch, time, heads, width] -> the same."""
    gain, bias = (params[name].reshape(y.shape[2:]) for name in ("gain", "bias"))
    return layer_norm({"gain": gain, "bias": bias}, y, 64e-5)
