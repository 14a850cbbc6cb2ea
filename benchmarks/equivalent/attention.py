"""Attention and its parts, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.equivalent.forms import Equivalence, Form, same

PROJECTIONS = {"q": "D H C", "k": "D H C", "v": "D H C", "o": "H C D"}


def projected(w: Any, x: Any) -> tuple[Any, ...]:
    return tuple(jnp.einsum("nsd,dhc->nshc", x, w[name]) for name in "qkv")


def around(attend: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Attention with its projections."""
    return lambda w, x: jnp.tanh(jnp.einsum("nshc,hcd->nsd", attend(*projected(w, x)), w["o"])).mean()


def by_einsum(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("nqhc,nkhc->nhqk", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("nhqk,nkhc->nqhc", jax.nn.softmax(scores), v)


def by_matmul(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    return jnp.swapaxes(jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])) @ v, 1, 2)


def by_vmap(q: Any, k: Any, v: Any) -> Any:
    def one(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v

    return jax.vmap(jax.vmap(one, 1, 1))(q, k, v)


def by_hand(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("nqhc,nkhc->nhqk", q, k) / np.sqrt(q.shape[-1])
    e = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    return jnp.einsum("nhqk,nkhc->nqhc", e / e.sum(-1, keepdims=True), v)


def turned(w: Any, x: Any) -> Any:
    """By reshapes and transposes of flat projections."""
    d, h, c = w["q"].shape

    def heads(name: str) -> Any:
        return (x @ w[name].reshape(d, h * c)).reshape(*x.shape[:2], h, c).transpose(0, 2, 1, 3)

    q, k, v = map(heads, "qkv")
    weights = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(c))
    mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(*x.shape[:2], h * c)
    return jnp.tanh(mixed @ w["o"].reshape(h * c, d)).mean()


def rescored(change: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Attention whose scores are changed before the soft-max."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = change(jnp.einsum("nqhc,nkhc->nhqk", q, k) / np.sqrt(q.shape[-1]))
        return jnp.einsum("nhqk,nkhc->nqhc", jax.nn.softmax(scores), v)

    return around(attend)


def lower(s: Any) -> Any:
    return jnp.tril(jnp.ones((s.shape[-2], s.shape[-1]), bool))


def counted(s: Any) -> Any:
    rows, columns = (lax.broadcasted_iota(jnp.int32, s.shape[-2:], k) for k in (0, 1))
    return rows >= columns


GROUPED = {"q": "D H C", "k": "D G C", "v": "D G C"}


def grouped(attend: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.tanh(attend(*projected(w, x))).mean()


def repeated(q: Any, k: Any, v: Any) -> Any:
    times = q.shape[2] // k.shape[2]
    return by_einsum(q, jnp.repeat(k, times, 2), jnp.repeat(v, times, 2))


def broadcast(q: Any, k: Any, v: Any) -> Any:
    n, s, g, c = k.shape

    def wide(x: Any) -> Any:
        return jnp.broadcast_to(x[:, :, :, None], (n, s, g, q.shape[2] // g, c)).reshape(n, s, q.shape[2], c)

    return by_einsum(q, wide(k), wide(v))


def in_groups(q: Any, k: Any, v: Any) -> Any:
    n, s, h, c = q.shape
    q = q.reshape(n, s, k.shape[2], h // k.shape[2], c)
    scores = jnp.einsum("nqgrc,nkgc->ngrqk", q, k) / np.sqrt(c)
    return jnp.einsum("ngrqk,nkgc->nqgrc", jax.nn.softmax(scores), v).reshape(n, s, h, c)


def rotated(turn: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def run(w: Any, x: Any) -> Any:
        q = jnp.einsum("nsd,dhc->nshc", x, w)
        half = q.shape[-1] // 2
        angle = jnp.arange(q.shape[1])[:, None] / 10000.0 ** (jnp.arange(half) / half)
        return jnp.square(turn(q, jnp.cos(angle).astype(q.dtype)[:, None], jnp.sin(angle).astype(q.dtype)[:, None]) - 1.0).mean()

    return run


def halves(q: Any, cos: Any, sin: Any) -> Any:
    a, b = jnp.split(q, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def rotate_half(q: Any, cos: Any, sin: Any) -> Any:
    a, b = q[..., : q.shape[-1] // 2], q[..., q.shape[-1] // 2 :]
    cos, sin = jnp.concatenate([cos, cos], -1), jnp.concatenate([sin, sin], -1)
    return q * cos + jnp.concatenate([-b, a], -1) * sin


def stacked_halves(q: Any, cos: Any, sin: Any) -> Any:
    a, b = jnp.moveaxis(q.reshape(*q.shape[:-1], 2, -1), -2, 0)
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], -2).reshape(q.shape)


def joined(attend: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.tanh(by_einsum(*attend(w, x))).mean()


def unstacked(w: Any, x: Any) -> Any:
    return jnp.moveaxis(jnp.einsum("nsd,dthc->nsthc", x, w), 2, 0)


def flat_split(w: Any, x: Any) -> Any:
    d, _, h, c = w.shape
    parts = jnp.split(x @ w.reshape(d, -1), 3, -1)
    return [p.reshape(*x.shape[:2], h, c) for p in parts]


def sliced_weights(w: Any, x: Any) -> Any:
    return [jnp.einsum("nsd,dhc->nshc", x, w[:, k]) for k in range(3)]


def unjoined(w: Any, x: Any) -> Any:
    return {name: w[:, k] for k, name in enumerate("qkv")}, x


def softmaxed(fn: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.square(fn(x @ w)).sum(-1).mean()


def exponentials(x: Any) -> Any:
    e = jnp.exp(x - lax.stop_gradient(x.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


LATENTS = {"latents": "T D", "q": "D C", "k": "D C", "v": "D C"}


def attended(attend: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Latents that attend to every sequence, as in a Perceiver."""
    return lambda w, x: jnp.tanh(attend(w, x @ w["k"], x @ w["v"])).mean()


def of_all_latents(w: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(jnp.einsum("tc,nsc->nts", w["latents"] @ w["q"], k))
    return jnp.einsum("nts,nsc->ntc", weights, v)


def of_each_sequence(w: Any, k: Any, v: Any) -> Any:
    return jax.vmap(lambda k, v: jax.nn.softmax((w["latents"] @ w["q"]) @ k.T) @ v)(k, v)


def of_copied_latents(w: Any, k: Any, v: Any) -> Any:
    latents = jnp.broadcast_to(w["latents"], (len(k), *w["latents"].shape))
    return jax.nn.softmax((latents @ w["q"]) @ jnp.swapaxes(k, 1, 2)) @ v


CLASSES: dict[str, Equivalence] = {
    "attention": same(
        *(PROJECTIONS, "N S D"),
        einsum=around(by_einsum), matmul=around(by_matmul), vmap=around(by_vmap), jax_nn=around(jax.nn.dot_product_attention),
        by_hand=around(by_hand), reshape_transpose=turned,
    ),
    "causal attention": same(
        *(PROJECTIONS, "N S D"),
        where=rescored(lambda s: jnp.where(lower(s), s, -1e30)),
        added=rescored(lambda s: s + jnp.where(lower(s), 0.0, -1e30).astype(s.dtype)),
        iota=rescored(lambda s: jnp.where(counted(s), s, -1e30)),
        jax_nn=around(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)),
    ),
    "grouped queries": same(
        *(GROUPED, "N S D"),
        repeat=grouped(repeated), broadcast=grouped(broadcast), groups=grouped(in_groups),
        jax_nn=grouped(jax.nn.dot_product_attention),
        differences=dict.fromkeys(
            ["repeat", "broadcast"], "keys and values are written H / G times; rule: a repeated operand is one read in groups"
        ),
    ),
    "query, key and value in one weight": same(
        *("D 3 H C", "N S D"),
        moveaxis=joined(unstacked), split=joined(flat_split), sliced_weights=joined(sliced_weights),
        separate=Form(joined(projected), unjoined),
        differences=dict.fromkeys(
            ["moveaxis", "split"], "the joined product is cut in three; rule: a part of a product is a product of a part"
        )
        | {"sliced weights": "parts of the weight are cut out, sent one by one; rule: a part of a product is a product of a part"},
    ),
    "latents": same(
        *(LATENTS, "N S D"),
        einsum=attended(of_all_latents), vmap=attended(of_each_sequence), copied=attended(of_copied_latents),
        differences={"copied": "latents are projected once for each sample; rule: a product of copies is a copy of the product"},
    ),
    "scaled scores": same(
        *(PROJECTIONS, "N S D"),
        scores=around(by_einsum),
        queries=around(lambda q, k, v: by_einsum_unscaled(q / np.sqrt(q.shape[-1]), k, v)),
        both=around(lambda q, k, v: by_einsum_unscaled(q * q.shape[-1] ** -0.25, k * k.shape[-1] ** -0.25, v)),
        differences=dict.fromkeys(["queries", "both"], "an operator more scales them; rule: a scale moves through a product"),
    ),
    "projection of the heads": same(
        *("H C D", "N S H C"),
        einsum=lambda w, x: jnp.tanh(jnp.einsum("nshc,hcd->nsd", x, w)).mean(),
        reshape=lambda w, x: jnp.tanh(x.reshape(*x.shape[:2], -1) @ w.reshape(-1, w.shape[-1])).mean(),
        tensordot=lambda w, x: jnp.tanh(jnp.tensordot(x, w, 2)).mean(),
        sum_of_heads=lambda w, x: jnp.tanh(jax.vmap(jnp.matmul, (2, 0))(x, w).sum(0)).mean(),
        differences={"sum of heads": "every head's result is written to memory and then added, not accumulated in one product"},
    ),
    "rotary embedding": same(
        *("D H C", "N S D"), halves=rotated(halves), rotate_half=rotated(rotate_half), stacked=rotated(stacked_halves),
    ),
    "soft-max": same(
        *("D V", "B D"),
        jax_nn=softmaxed(jax.nn.softmax),
        by_hand=softmaxed(exponentials),
        vmap=softmaxed(jax.vmap(jax.nn.softmax)),
        exp_of_log=softmaxed(lambda x: jnp.exp(jax.nn.log_softmax(x))),
        logsumexp=softmaxed(lambda x: jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True))),
    ),
    "linear attention": same(
        *({"q": "D H C", "k": "D H C", "v": "D H C"}, "N S D"),
        einsum=grouped(lambda q, k, v: jnp.einsum("nqhc,nhce->nqhe", jnp.tanh(q), jnp.einsum("nkhc,nkhe->nhce", jnp.exp(k), v))),
        matmul=grouped(
            lambda q, k, v: jnp.swapaxes(
                jnp.swapaxes(jnp.tanh(q), 1, 2) @ (jnp.moveaxis(jnp.exp(k), 1, 3) @ jnp.swapaxes(v, 1, 2)), 1, 2
            )
        ),
        vmap=grouped(lambda q, k, v: jax.vmap(jax.vmap(lambda q, k, v: jnp.tanh(q) @ (jnp.exp(k).T @ v), 1, 1))(q, k, v)),
    ),
}  # fmt: skip


def by_einsum_unscaled(q: Any, k: Any, v: Any) -> Any:
    return jnp.einsum("nhqk,nkhc->nqhc", jax.nn.softmax(jnp.einsum("nqhc,nkhc->nhqk", q, k)), v)
