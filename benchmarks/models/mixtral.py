"""Mixtral 8x7B's decoder (2024): Llama's attention, and 8 experts of which every token has two; 46,702,792,704 parameters."""

import jax
import jax.numpy as jnp

from .llama import grouped_attention, rms_norm
from .losses import cast, cross_entropy
from .model import Model, Tree, f32, i32
from .stack import scanned, unrolled

ROTARY_BASE = 1_000_000.0


def mixtral(
    *,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    feed_forward: int = 14336,
    experts: int = 8,
    vocab: int = 32000,
    seq: int = 4096,
    batch: int = 64,
    group: int = 1024,
    capacity: float | None = 1.25,
    chosen: int = 2,
    shared: int = 0,
    scan: bool = False,
    remat: bool = False,
    compute: str = "bfloat16",
) -> Model:
    """Mean cross-entropy of the next token; `scan`, `remat` and `compute` as for GPT.

    Tokens are dispatched as in GShard and MaxText: in groups of `group`, each expert takes `capacity` times its share of a group,
    and leaves out the rest. Without a capacity, all tokens are sorted by expert, and none is left out.

    Args:
        chosen: the experts of each token.
        shared: the width of an expert that every token has besides, as in DeepSeek-V3.
    """
    dtype, stack = jnp.dtype(compute), scanned if scan else unrolled
    head = hidden // heads

    def mixed_of(params: Tree, x: jax.Array) -> jax.Array:
        if capacity is None:
            return sorted_mixture(params, x, chosen)
        return mixture(params, x, group, int(chosen * group * capacity) // experts, chosen)

    def block(params: Tree, x: jax.Array) -> jax.Array:
        params = cast(params, dtype)
        attended = grouped_attention(params["attention"], rms_norm(params["norm1"], x), head, ROTARY_BASE)
        with jax.named_scope("residual"):
            x = x + attended
        normed = rms_norm(params["norm2"], x)
        mixed = mixed_of(params["experts"], normed)
        if shared:
            mixed = mixed + gated(params["shared"], normed)
        with jax.named_scope("residual"):
            return x + mixed

    def loss(params: Tree, data: Tree) -> jax.Array:
        with jax.named_scope("token"):
            x = params["token"]["table"].astype(dtype)[data["tokens"]]
        x = stack.apply(jax.checkpoint(block) if remat else block, params["blocks"], x)
        x = rms_norm(cast(params["norm"], dtype), x)
        with jax.named_scope("head"):
            logits = jnp.matmul(x, params["head"]["weight"].astype(dtype), preferred_element_type=jnp.float32)
        return cross_entropy(logits, data["labels"])

    one = {
        "norm1": {"gain": f32(hidden)},
        "attention": {
            "query": {"weight": f32(hidden, heads * head)},
            "key": {"weight": f32(hidden, kv_heads * head)},
            "value": {"weight": f32(hidden, kv_heads * head)},
            "out": {"weight": f32(heads * head, hidden)},
        },
        "norm2": {"gain": f32(hidden)},
        "experts": {
            "router": {"weight": f32(hidden, experts)},
            "gate": {"weight": f32(experts, hidden, feed_forward)},
            "up": {"weight": f32(experts, hidden, feed_forward)},
            "down": {"weight": f32(experts, feed_forward, hidden)},
        },
    }
    if shared:
        one["shared"] = {
            "gate": {"weight": f32(hidden, shared)},
            "up": {"weight": f32(hidden, shared)},
            "down": {"weight": f32(shared, hidden)},
        }
    params = {
        "token": {"table": f32(vocab, hidden)},
        "blocks": stack.params(one, layers),
        "norm": {"gain": f32(hidden)},
        "head": {"weight": f32(hidden, vocab)},
    }
    data = {"tokens": i32(batch, seq), "labels": i32(batch, seq)}
    return Model("mixtral", loss, params, data, below={"tokens": vocab, "labels": vocab})


def gated(params: Tree, x: jax.Array) -> jax.Array:
    """Every token through the shared expert."""
    with jax.named_scope("shared"):
        hidden = jax.nn.silu(x @ params["gate"]["weight"]) * (x @ params["up"]["weight"])
        return hidden @ params["down"]["weight"]


def sorted_mixture(params: Tree, x: jax.Array, chosen: int) -> jax.Array:
    """Every token through its experts, none left out: tokens are sorted by expert, multiplied in groups, and moved back."""
    with jax.named_scope("experts"):
        tokens = x.reshape(-1, x.shape[-1])
        with jax.named_scope("router"):
            scores = jnp.matmul(tokens, params["router"]["weight"], preferred_element_type=jnp.float32)
            weights, experts = jax.lax.top_k(scores, chosen)
            weights = jax.nn.softmax(weights).astype(x.dtype)
            order = jnp.argsort(experts.reshape(-1))
            sizes = jnp.bincount(experts.reshape(-1), length=scores.shape[-1])
        with jax.named_scope("dispatch"):
            taken = tokens[order // chosen]
        with jax.named_scope("gate"):
            gate = jax.lax.ragged_dot(taken, params["gate"]["weight"], sizes)
        with jax.named_scope("up"):
            up = jax.lax.ragged_dot(taken, params["up"]["weight"], sizes)
        with jax.named_scope("down"):
            done = jax.lax.ragged_dot(jax.nn.silu(gate) * up, params["down"]["weight"], sizes)
        with jax.named_scope("combine"):
            done = done[jnp.argsort(order)].reshape(-1, chosen, x.shape[-1])
            return jnp.einsum("tkm,tk->tm", done, weights).reshape(x.shape)


def mixture(params: Tree, x: jax.Array, group: int, places: int, chosen: int = 2) -> jax.Array:
    """Every token through its experts. [batch, sequence, width] -> the same."""
    with jax.named_scope("experts"):
        tokens = x.reshape(x.shape[0], -1, group, x.shape[2])
        send, weigh = _routes(params["router"]["weight"], tokens, places, chosen)
        with jax.named_scope("dispatch"):
            taken = jnp.einsum("bgtep,bgtm->ebgpm", send, tokens)
        with jax.named_scope("gate"):
            gate = jnp.einsum("ebgpm,emf->ebgpf", taken, params["gate"]["weight"])
        with jax.named_scope("up"):
            up = jnp.einsum("ebgpm,emf->ebgpf", taken, params["up"]["weight"])
        with jax.named_scope("down"):
            done = jnp.einsum("ebgpf,efm->ebgpm", jax.nn.silu(gate) * up, params["down"]["weight"])
        with jax.named_scope("combine"):
            return jnp.einsum("bgtep,ebgpm->bgtm", weigh, done).reshape(x.shape)


def _routes(router: jax.Array, tokens: jax.Array, places: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Which place of which expert every token takes, as ones and weighed. Both [batch, group, token, expert, place]."""
    with jax.named_scope("router"):
        scores = jnp.matmul(tokens, router, preferred_element_type=jnp.float32)
        weights, chosen = jax.lax.top_k(scores, count)
        weights = jax.nn.softmax(weights)
        ones = jax.nn.one_hot(chosen, scores.shape[-1], dtype=jnp.float32)  # [batch, group, token, choice, expert]
        wants = jnp.sum(ones, axis=3)
        place = jnp.cumsum(wants, axis=2) - wants  # how many tokens before this one an expert takes
        free = jax.nn.one_hot(place.astype(jnp.int32), places, dtype=tokens.dtype)  # nothing where the expert is full
        share = jnp.einsum("bgtc,bgtce->bgte", weights, ones).astype(tokens.dtype)
        return wants.astype(tokens.dtype)[..., None] * free, share[..., None] * free
