"""Mamba-2 (Dao and Gu 2024): state space layers, computed in chunks; with its default sizes it has 1.3 billion parameters."""

import jax
import jax.numpy as jnp

from .llama import rms_norm
from .losses import cast, cross_entropy
from .model import Model, Tree, f32, i32
from .stack import scanned, unrolled


def mamba2(
    *,
    layers: int = 48,
    hidden: int = 2048,
    state: int = 128,
    head: int = 64,
    window: int = 4,
    chunk: int = 256,
    vocab: int = 50288,
    seq: int = 2048,
    batch: int = 32,
    scan: bool = False,
    remat: bool = False,
    compute: str = "bfloat16",
) -> Model:
    """Mean cross-entropy of the next token; logits are products with the embedding table. `scan`, `remat`, `compute` as for GPT.

    `state` numbers for each of the channels, which are in heads of width `head`; `chunk` steps are computed as one product.
    """
    dtype, stack, inner = jnp.dtype(compute), scanned if scan else unrolled, 2 * hidden
    heads, mixed = inner // head, inner + 2 * state

    def block(params: Tree, x: jax.Array) -> jax.Array:
        params = cast(params, dtype)
        joined = rms_norm(params["norm"], x) @ params["in"]["weight"]
        gate, xbc, step = jnp.split(joined, [inner, inner + mixed], axis=-1)
        y, b, c = jnp.split(jax.nn.silu(_convolved(params["conv"], xbc)), [inner, inner + state], axis=-1)
        y = y.reshape(*y.shape[:2], heads, head)
        step = jax.nn.softplus(step.astype(jnp.float32) + params["step"]["bias"].astype(jnp.float32))
        decay = -jnp.exp(params["decay"]["bias"].astype(jnp.float32)) * step
        out = state_space(y * step[..., None].astype(dtype), decay, b, c, chunk) + y * params["skip"]["gain"][:, None]
        out = rms_norm(params["inner_norm"], out.reshape(*x.shape[:2], inner) * jax.nn.silu(gate))
        return x + out @ params["out"]["weight"]

    def loss(params: Tree, data: Tree) -> jax.Array:
        table = params["token"]["table"].astype(dtype)
        x = stack.apply(jax.checkpoint(block) if remat else block, params["blocks"], table[data["tokens"]])
        x = rms_norm(cast(params["norm"], dtype), x)
        return cross_entropy(jnp.matmul(x, table.T, preferred_element_type=jnp.float32), data["labels"])

    one = {
        "norm": {"gain": f32(hidden)},
        "in": {"weight": f32(hidden, inner + mixed + heads)},
        "conv": {"weight": f32(window, mixed), "bias": f32(mixed)},
        "step": {"bias": f32(heads)},
        "decay": {"bias": f32(heads)},
        "skip": {"gain": f32(heads)},
        "inner_norm": {"gain": f32(inner)},
        "out": {"weight": f32(inner, hidden)},
    }
    params = {"token": {"table": f32(vocab, hidden)}, "blocks": stack.params(one, layers), "norm": {"gain": f32(hidden)}}
    data = {"tokens": i32(batch, seq), "labels": i32(batch, seq)}
    return Model("mamba2", loss, params, data, below={"tokens": vocab, "labels": vocab})


def state_space(x: jax.Array, decay: jax.Array, b: jax.Array, c: jax.Array, chunk: int) -> jax.Array:
    """The outputs of a state that decays: s[t] = exp(decay[t]) s[t-1] + b[t] x[t], y[t] = c[t] s[t].

    Within a chunk it is a product with a triangle of decays; from chunk to chunk, the states are passed on.

    Args:
        x: [batch, time, heads, width].
        decay: [batch, time, heads].
        b: [batch, time, state], shared by the heads.
        c: as `b`.
        chunk: the steps of a chunk.
    """
    samples, time, heads, _ = x.shape
    x, b, c = (v.reshape(samples, time // chunk, chunk, *v.shape[2:]) for v in (x, b, c))
    decay = decay.reshape(samples, -1, chunk, heads).transpose(0, 3, 1, 2)  # [batch, heads, chunks, steps]
    sums = jnp.cumsum(decay, axis=-1)
    weights = jnp.exp(_between(decay)).astype(x.dtype)
    within = jnp.einsum("zcln,zcsn,zhcls,zcshp->zclhp", c, b, weights, x)
    left = jnp.exp(sums[..., -1:] - sums).astype(x.dtype)
    states = jnp.einsum("zcln,zhcl,zclhp->zchpn", b, left, x)
    states = jnp.concatenate([jnp.zeros_like(states[:, :1]), states], axis=1)
    passed = jnp.exp(_between(jnp.pad(sums[..., -1], ((0, 0), (0, 0), (1, 0))))).astype(x.dtype)
    before = jnp.einsum("zhec,zchpn->zehpn", passed, states)[:, :-1]
    across = jnp.einsum("zcln,zchpn,zhcl->zclhp", c, before, jnp.exp(sums).astype(x.dtype))
    return (within + across).reshape(samples, time, heads, -1)


def _between(x: jax.Array) -> jax.Array:
    """Sums of x over the steps after one up to another, minus infinity where it is later. [..., steps] -> [..., to, from]."""
    sums = jnp.cumsum(x, axis=-1)
    steps = jnp.arange(x.shape[-1])
    return jnp.where(steps[:, None] >= steps[None, :], sums[..., :, None] - sums[..., None, :], -jnp.inf)


def _convolved(params: Tree, x: jax.Array) -> jax.Array:
    """Each channel as a sum over a window of the steps up to the present one. [batch, time, channels] -> the same."""
    window = params["weight"].shape[0]
    padded = jnp.pad(x, ((0, 0), (window - 1, 0), (0, 0)))
    return sum(padded[:, k : k + x.shape[1]] * params["weight"][k] for k in range(window)) + params["bias"]
