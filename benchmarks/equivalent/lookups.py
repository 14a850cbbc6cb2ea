"""Look-ups of tokens, labels and rows, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.equivalent.forms import Equivalence, same
from benchmarks.equivalent.losses import picked

PICKED = {"w": "D D", "out": "D D"}


def tokens(pick: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Some tokens of every sequence, between two products."""
    return lambda w, x, i: jnp.square(jnp.tanh(pick(x @ w["w"], i)) @ w["out"]).mean()


def last(pick: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """The last token of sequences of several lengths."""
    return lambda w, x, n: jnp.square(pick(jnp.tanh(x @ w["w"]), n) @ w["out"]).mean()


def optax_loss(logits: Any, y: Any) -> Any:
    """Optax's `softmax_cross_entropy_with_integer_labels`."""
    logits = logits - lax.stop_gradient(logits.max(-1, keepdims=True))
    labels = jnp.take_along_axis(logits, jnp.expand_dims(y, -1), axis=-1).take(0, axis=-1)
    return jnp.log(jnp.exp(logits).sum(-1)) - labels


def loss(logits: Any, y: Any) -> Any:
    return jax.nn.logsumexp(logits, -1) - picked(logits, y)


def rolled(w: Any, x: Any, y: Any) -> Any:
    is_last = jnp.arange(y.shape[1]) == y.shape[1] - 1
    return jnp.where(is_last, 0, loss(x @ w, jnp.roll(y, -1, 1))).sum() / (y.shape[0] * (y.shape[1] - 1))


def hinge(others: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """How far the best wrong logit is above the right one."""
    return lambda w, x, y: (lambda h: jax.nn.relu(1 + others(h, y) - picked(h, y)).mean())(x @ w)


def each_hinge(w: Any, x: Any, y: Any) -> Any:
    def one(x: Any, y: Any) -> Any:
        h = x @ w
        return jax.nn.relu(1 + jnp.where(jnp.arange(len(h)) == y, -1e30, h).max() - h[y])

    return jax.vmap(one)(x, y).mean()


def margin(lower: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Cross-entropy in which the right logit is lowered."""

    def loss(w: Any, x: Any, y: Any) -> Any:
        logits = lower(x @ w, y)
        return (jax.nn.logsumexp(logits, -1) - picked(logits, y)).mean()

    return loss


def segments(look: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Embeddings of tokens and of one of two segments."""
    return lambda w, i, g: jnp.tanh(w["tokens"][i] + look(w["segments"], g)).mean()


def padding(look: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Embeddings, which are zero for token 0."""
    return lambda w, i, x: jnp.tanh(look(w["table"], i) @ w["out"] + x).mean()


def neighbours(mean: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any, Any], Any]:
    """The mean of the features of a node's neighbours."""
    return lambda w, x, i, j: jnp.tanh(mean(x @ w, i, j)).mean()


def by_segments(h: Any, i: Any, j: Any) -> Any:
    degrees = jax.ops.segment_sum(jnp.ones(len(j), h.dtype), j, len(h))
    return jax.ops.segment_sum(h[i], j, len(h)) / jnp.maximum(degrees, 1)[:, None]


def by_scatter(h: Any, i: Any, j: Any) -> Any:
    degrees = jnp.zeros(len(h), h.dtype).at[j].add(1)
    return jnp.zeros_like(h).at[j].add(jnp.take(h, i, axis=0)) / jnp.maximum(degrees, 1)[:, None]


def by_bincount(h: Any, i: Any, j: Any) -> Any:
    return jax.ops.segment_sum(h[i], j, len(h)) / jnp.maximum(jnp.bincount(j, length=len(h)), 1).astype(h.dtype)[:, None]


CLASSES: dict[str, Equivalence] = {
    "tokens of sequences": same(
        *(PICKED, "N S D", "N T < S"),
        along=tokens(lambda x, i: jnp.take_along_axis(x, i[..., None], 1)),
        index=tokens(lambda x, i: x[jnp.arange(len(x))[:, None], i]),
        vmap=tokens(jax.vmap(lambda x, i: x[i])),
        flat=tokens(lambda x, i: x.reshape(-1, x.shape[-1])[i + jnp.arange(len(x))[:, None] * x.shape[1]]),
        differences={"flat": "one table of all tokens, divided by its columns; rule: such rows are a look-up in every sequence"},
    ),
    "last token": same(
        *(PICKED, "N S D", "N < S"),
        index=last(lambda x, n: x[jnp.arange(len(x)), n]),
        along=last(lambda x, n: jnp.take_along_axis(x, n[:, None, None], 1)[:, 0]),
        dynamic=last(jax.vmap(lambda x, n: lax.dynamic_index_in_dim(x, n, keepdims=False))),
        one_hot=last(lambda x, n: jnp.einsum("ns,nsd->nd", jax.nn.one_hot(n, x.shape[1], dtype=x.dtype), x)),
        where=last(lambda x, n: jnp.where((jnp.arange(x.shape[1]) == n[:, None])[..., None], x, 0).sum(1)),
        differences={
            **dict.fromkeys(["index", "along", "dynamic"], "a gather, whose gradient is a scatter; rule: it is a masked sum"),
            "one hot": "a product with one-hot rows; rule: it is a gather",
        },
    ),
    "cross-entropy of the next token": same(
        *("D V", "N S D", "N S < V"),
        logits=lambda w, x, y: loss((x @ w)[:, :-1], y[:, 1:]).mean(),
        losses=lambda w, x, y: loss(x @ w, jnp.pad(y[:, 1:], ((0, 0), (0, 1))))[:, :-1].mean(),
        rolled=rolled,
        vmap=lambda w, x, y: jax.vmap(lambda x, y: optax_loss((x @ w)[:-1], y[1:]).mean())(x, y).mean(),
        inputs=lambda w, x, y: loss(x[:, :-1] @ w, y[:, 1:]).mean(),
        differences={"inputs": "the inputs are cut in memory to an odd length; rule: a part of a product is a product of a part"},
    ),
    "hinge loss": same(
        *("D V", "B D", "B < V"),
        one_hot=hinge(lambda h, y: jnp.where(jax.nn.one_hot(y, h.shape[-1], dtype=bool), -1e30, h).max(-1)),
        equal=hinge(lambda h, y: jnp.where(y[:, None] == jnp.arange(h.shape[-1]), -1e30, h).max(-1)),
        at=hinge(lambda h, y: h.at[jnp.arange(len(y)), y].set(-1e30).max(-1)),
        vmap=each_hinge,
    ),
    "margin of the right logit": same(
        *("D V", "B D", "B < V"),
        one_hot=margin(lambda h, y: h - 0.2 * jax.nn.one_hot(y, h.shape[-1], dtype=h.dtype)),
        where=margin(lambda h, y: jnp.where(jnp.arange(h.shape[-1]) == y[:, None], h - 0.2, h)),
        at=margin(lambda h, y: h.at[jnp.arange(len(y)), y].add(-0.2)),
        vmap=margin(jax.vmap(lambda h, y: h.at[y].add(-0.2))),
        differences=dict.fromkeys(["at", "vmap"], "logits go through memory again; rule: a scatter to each row is a choice"),
    ),
    "embedding of two segments": same(
        *({"tokens": "V D", "segments": "2 D"}, "N S < V", "N S < 2"),
        index=segments(lambda t, g: t[g]), take=segments(lambda t, g: jnp.take(t, g, axis=0)),
        one_hot=segments(lambda t, g: jax.nn.one_hot(g, 2, dtype=t.dtype) @ t),
        where=segments(lambda t, g: jnp.where(g[..., None] > 0, t[1], t[0])),
        line=segments(lambda t, g: t[0] + g[..., None] * (t[1] - t[0])),
        differences=dict.fromkeys(
            ["index", "take", "one hot"], "all rows go through memory; rule: a look-up in a table of two rows is a choice"
        ),
    ),
    "embedding without padding": same(
        *({"table": "V D", "out": "D D"}, "B < V", "B D"),
        where=padding(lambda t, i: jnp.where((i == 0)[:, None], 0, t[i])),
        product=padding(lambda t, i: t[i] * (i != 0)[:, None]),
        fill=padding(lambda t, i: t.at[jnp.where(i == 0, len(t), i)].get(mode="fill", fill_value=0)),
        vmap=padding(lambda t, i: jax.vmap(lambda i: jnp.where(i == 0, 0, t[i]))(i)),
        set=padding(lambda t, i: t.at[0].set(0)[i]),
        differences={
            **dict.fromkeys(["where", "product", "vmap"], "rows go through memory again; rule: a masked row is one out of bounds"),
            "set": "the table is copied; rule: a masked row is one out of bounds",
        },
    ),
    "mean of neighbours": same(
        *("D D", "S D", "B < S", "B < S"),
        segment_sum=neighbours(by_segments), scatter=neighbours(by_scatter), bincount=neighbours(by_bincount),
    ),
}  # fmt: skip
