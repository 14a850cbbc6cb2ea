"""Means, covariances, likelihoods and poolings, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.equivalent.forms import Equivalence, Form, same
from benchmarks.equivalent.loops import added
from benchmarks.equivalent.losses import picked

WEIGHT, ROWS = "D F", "B D"


def averaged(mean: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """A mean over samples, between two products."""
    return lambda w, x: jnp.square(mean(jnp.tanh(x @ w)) @ w.T).sum()


def exponentials(fn: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: fn(x @ w).mean()


def shifted(x: Any) -> Any:
    top = lax.stop_gradient(x.max(-1, keepdims=True))
    return jnp.log(jnp.exp(x - top).sum(-1)) + top[..., 0]


def by_ones(x: Any) -> Any:
    top = lax.stop_gradient(x.max(-1))
    return jnp.log(jnp.exp(x - top[:, None]) @ jnp.ones(x.shape[-1], x.dtype)) + top


def regularized(w: Any, x: Any, y: Any) -> Any:
    """Cross-entropy and the square of its normalizer."""
    logits = x @ w
    z = jax.nn.logsumexp(logits, -1)
    return (z - picked(logits, y) + 1e-4 * z**2).mean()


def regularized_apart(w: Any, x: Any, y: Any) -> Any:
    logits = x @ w
    loss = -picked(jax.nn.log_softmax(logits), y).mean()
    return loss + 1e-4 * jnp.square(jax.nn.logsumexp(logits, -1)).mean()


def regularized_each(w: Any, x: Any, y: Any) -> Any:
    def one(x: Any, y: Any) -> Any:
        logits = x @ w
        z = jax.nn.logsumexp(logits)
        return z - logits[y] + 1e-4 * z * z

    return jax.vmap(one)(x, y).mean()


def regularized_one_hot(w: Any, x: Any, y: Any) -> Any:
    logits = x @ w
    z = shifted(logits)
    return jnp.mean(z - (jax.nn.one_hot(y, logits.shape[-1]) * logits).sum(-1) + 1e-4 * z * z)


HEADS = {"mean": "D D", "log": "D D"}


def likelihood(fn: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Of a normal distribution whose mean and logarithm of the variance are products."""
    return lambda w, x, y: fn(x @ w["mean"], x @ w["log"], y)


def twice_products(w: Any, x: Any, y: Any) -> Any:
    def one(x: Any, y: Any) -> Any:
        mean, log = x @ w["mean"], x @ w["log"]
        return 0.5 * (log + (y - mean) ** 2 * jnp.exp(-log)).mean()

    return jax.vmap(one)(x, y).mean()


def correlated(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """How far the correlation of two views' features is from the identity."""

    def loss(w: Any, x: Any, y: Any) -> Any:
        a, b = ((v - v.mean(0)) * lax.rsqrt(v.var(0) + 1e-5) for v in (x @ w, y @ w))
        return jnp.square(fn(a, b) / len(a) - jnp.eye(a.shape[-1], dtype=a.dtype)).sum()

    return loss


EXCITED = {"k": "3 3 A O", "down": "O K", "up": "K O"}


def excited(pool: Callable[[Any], Any], scale: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Channels scaled by what their means say."""

    def loss(w: Any, x: Any) -> Any:
        x = lax.conv_general_dilated(x, w["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.tanh(scale(x, jax.nn.sigmoid(jax.nn.relu(pool(x) @ w["down"]) @ w["up"]))).mean()

    return loss


def everywhere(x: Any, s: Any) -> Any:
    return x * s[:, None, None]


def heads(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: fn(jnp.tanh(x @ w["trunk"]), w["heads"])


TASKS = ({"trunk": "D F", "heads": "M F C"}, "B D")

CLASSES: dict[str, Equivalence] = {
    "mean over samples": same(
        *(WEIGHT, ROWS),
        mean=averaged(lambda h: h.mean(0)), sum_by_n=averaged(lambda h: h.sum(0) / len(h)),
        ones=averaged(lambda h: jnp.ones(len(h), h.dtype) @ h / len(h)),
        weights=averaged(lambda h: jnp.einsum("b,bf->f", jnp.full(len(h), 1 / len(h), h.dtype), h)),
        vmap=averaged(jax.vmap(jnp.mean, 1)), transposed=averaged(lambda h: h.T.mean(1)),
        differences=dict.fromkeys(
            ["ones", "weights"], "samples go through memory to a product with ones; rule: a product with ones is a sum"
        ),
    ),
    "log of a sum of exponentials": same(
        *("D V", ROWS),
        logsumexp=exponentials(lambda x: jax.nn.logsumexp(x, -1)), by_hand=exponentials(shifted),
        vmap=exponentials(jax.vmap(jax.nn.logsumexp)), reduced=exponentials(lambda x: x[:, 0] - jax.nn.log_softmax(x)[:, 0]),
        ones=exponentials(by_ones),
        differences={
            "reduced": "all of the log-soft-max is written to memory for one column; rule: a slice moves through elementwise work",
            "ones": "exponentials go through memory to a product with ones; rule: a product with ones is a sum",
        },
    ),
    "cross-entropy, normalizer": same(
        *("D V", ROWS, "B < V"),
        shared=regularized, apart=regularized_apart, vmap=regularized_each, one_hot=regularized_one_hot,
        differences={"apart": "two soft-maxes, and sums over devices, for one; rule: log-soft-max is logits less their logsumexp"},
    ),
    "Gaussian likelihood": same(
        *(HEADS, ROWS, ROWS),
        exp=likelihood(lambda m, s, y: 0.5 * (s + (y - m) ** 2 * jnp.exp(-s)).mean()),
        ratio=likelihood(lambda m, s, y: 0.5 * (s + jnp.square(y - m) / jnp.exp(s)).mean()),
        scaled=likelihood(lambda m, s, y: (0.5 * s + 0.5 * ((y - m) * jnp.exp(-0.5 * s)) ** 2).mean()),
        means=likelihood(lambda m, s, y: 0.5 * s.mean() + 0.5 * (jnp.square(m - y) * jnp.exp(-s)).sum() / y.size),
        vmap=twice_products,
    ),
    "correlation of two views": same(
        *("D D", ROWS, ROWS),
        matmul=correlated(lambda a, b: a.T @ b), einsum=correlated(lambda a, b: jnp.einsum("bi,bj->ij", a, b)),
        tensordot=correlated(lambda a, b: jnp.tensordot(a, b, ((0,), (0,)))),
        vmap=correlated(lambda a, b: jax.vmap(lambda c: c @ b, 1)(a)),
    ),
    "squeeze and excitation": same(
        *(EXCITED, "N I I A"),
        mean=excited(lambda x: x.mean((1, 2)), everywhere),
        einsum=excited(
            lambda x: jnp.einsum("nhwo->no", x) / (x.shape[1] * x.shape[2]), lambda x, s: jnp.einsum("nhwo,no->nhwo", x, s)
        ),
        kept=excited(lambda x: x.mean((1, 2), keepdims=True), lambda x, s: x * s),
        vmap=excited(jax.vmap(lambda x: x.mean((0, 1))), jax.vmap(lambda x, s: x * s)),
        rows=excited(
            lambda x: x.reshape(len(x), -1, x.shape[-1]).mean(1),
            lambda x, s: (x.reshape(len(x), -1, x.shape[-1]) * s[:, None]).reshape(x.shape),
        ),
    ),
    "several heads": same(
        *TASKS,
        einsum=heads(lambda h, w: jnp.square(jnp.einsum("bf,mfc->mbc", h, w)).mean()),
        vmap=heads(lambda h, w: jax.vmap(lambda v: jnp.square(h @ v).mean())(w).mean()),
        flat=heads(lambda h, w: jnp.square(h @ jnp.moveaxis(w, 0, 1).reshape(h.shape[1], -1)).mean()),
        list=Form(
            lambda w, x: added(jnp.square(jnp.tanh(x @ w["trunk"]) @ v).mean() for v in w["heads"]) / len(w["heads"]),
            lambda w, x: ({"trunk": w["trunk"], "heads": [w["heads"][k] for k in range(len(w["heads"]))]}, x),
        ),
        differences={
            "list": "the trunk's result is read from memory M times; rule: products of one operand are one product",
            "flat": "the weights are transposed in memory",
        },
    ),
    "mean of the valid": same(
        *("D F", ROWS, "B"),
        product=lambda w, x, m: ((jnp.tanh(x @ w).mean(-1) * m).sum() / (m * m).sum()),
        rows=lambda w, x, m: (jnp.tanh(x @ w) * m[:, None]).mean(-1).sum() / jnp.square(m).sum(),
        dot=lambda w, x, m: m @ jnp.tanh(x @ w).mean(-1) / (m @ m),
        einsum=lambda w, x, m: jnp.einsum("b,bf->", m, jnp.tanh(x @ w)) / w.shape[1] / jnp.vdot(m, m),
        vmap=lambda w, x, m: jax.vmap(lambda x, m: m * jnp.tanh(x @ w).mean())(x, m).sum() / jnp.sum(m * m),
    ),
}  # fmt: skip
