"""Losses, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.equivalent.forms import Equivalence, same


def picked(values: Any, y: Any) -> Any:
    return jnp.take_along_axis(values, y[..., None], -1)[..., 0]


def one_hot(w: Any, x: Any, y: Any) -> Any:
    logits = x @ w
    shifted = logits - lax.stop_gradient(logits.max(-1, keepdims=True))
    return (jnp.log(jnp.exp(shifted).sum(-1)) - (shifted * jax.nn.one_hot(y, logits.shape[-1])).sum(-1)).mean()


def log_softmax(w: Any, x: Any, y: Any) -> Any:
    return -picked(jax.nn.log_softmax(x @ w), y).mean()


def one_hot_log_softmax(w: Any, x: Any, y: Any) -> Any:
    logits = x @ w
    return -jnp.mean(jnp.sum(jax.nn.one_hot(y, logits.shape[-1]) * jax.nn.log_softmax(logits), -1))


def logsumexp(w: Any, x: Any, y: Any) -> Any:
    logits = x @ w
    return (jax.nn.logsumexp(logits, -1) - picked(logits, y)).mean()


def by_vmap(w: Any, x: Any, y: Any) -> Any:
    def one(x: Any, y: Any) -> Any:
        logits = x @ w
        return jax.nn.logsumexp(logits) - logits[y]

    return jax.vmap(one)(x, y).mean()


def masked_where(w: Any, x: Any, y: Any, mask: Any) -> Any:
    logits = x @ w
    losses = jax.nn.logsumexp(logits, -1) - picked(logits, y)
    return jnp.where(mask > 0, losses, 0.0).sum() / jnp.sum(mask > 0)


def masked_product(w: Any, x: Any, y: Any, mask: Any) -> Any:
    logits = x @ w
    keep = (mask > 0).astype(x.dtype)
    return ((jax.nn.logsumexp(logits, -1) - picked(logits, y)) * keep).sum() / keep.sum()


def masked_average(w: Any, x: Any, y: Any, mask: Any) -> Any:
    logits = x @ w
    return jnp.average(jax.nn.logsumexp(logits, -1) - picked(logits, y), weights=(mask > 0).astype(x.dtype))


def masked_dot(w: Any, x: Any, y: Any, mask: Any) -> Any:
    logits = x @ w
    keep = (mask > 0).astype(x.dtype)
    return jnp.dot(keep / keep.sum(), jax.nn.logsumexp(logits, -1) - picked(logits, y))


def smooth_targets(w: Any, x: Any, y: Any) -> Any:
    logits = x @ w
    n = logits.shape[-1]
    targets = 0.9 * jax.nn.one_hot(y, n, dtype=x.dtype) + 0.1 / n
    return -(targets * jax.nn.log_softmax(logits)).sum(-1).mean()


def smooth_parts(w: Any, x: Any, y: Any) -> Any:
    logs = jax.nn.log_softmax(x @ w)
    return -(0.9 * picked(logs, y) + 0.1 * logs.mean(-1)).mean()


def smooth_logsumexp(w: Any, x: Any, y: Any) -> Any:
    logits = x @ w
    return (jax.nn.logsumexp(logits, -1) - 0.9 * picked(logits, y) - 0.1 * logits.mean(-1)).mean()


def distill(student: Any, teacher: Any) -> Any:
    p = jax.nn.softmax(teacher)
    return (p * (jax.nn.log_softmax(teacher) - jax.nn.log_softmax(student))).sum(-1).mean()


def distill_entropies(student: Any, teacher: Any) -> Any:
    p, logs = jax.nn.softmax(teacher), jax.nn.log_softmax(teacher)
    return jnp.mean((p * logs).sum(-1) - (p * jax.nn.log_softmax(student)).sum(-1))


def distill_vmap(student: Any, teacher: Any) -> Any:
    def one(s: Any, t: Any) -> Any:
        logs = jax.nn.log_softmax(t)
        return jnp.sum(jnp.exp(logs) * (logs - jax.nn.log_softmax(s)))

    return jax.vmap(one)(student, teacher).mean()


def contrast(logits: Any) -> dict[str, Any]:
    return {
        "diagonal": lambda w, x, y: -jnp.diagonal(jax.nn.log_softmax(logits(w, x, y))).mean(),
        "trace": lambda w, x, y: -jnp.trace(jax.nn.log_softmax(logits(w, x, y))) / len(x),
        "index": lambda w, x, y: -picked(jax.nn.log_softmax(logits(w, x, y)), jnp.arange(len(x))).mean(),
        "eye": lambda w, x, y: -(jnp.eye(len(x), dtype=x.dtype) * jax.nn.log_softmax(logits(w, x, y))).sum() / len(x),
    }


def bits(values: Any, y: Any) -> Any:
    return jnp.mean(jnp.maximum(values, 0) - values * y + jnp.log1p(jnp.exp(-jnp.abs(values))))


def overlap(sums: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Any, Any, Any], Any]:
    """One less Dice's coefficient of a whole batch, from twice the intersection and the sum of both sizes."""

    def loss(w: Any, x: Any, y: Any) -> Any:
        both, all_ = sums(jax.nn.sigmoid(x @ w), y)
        return 1 - (2 * both + 1) / (all_ + 1)

    return loss


def boxes(ratio: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """One less the mean ratio of the intersection to the union of boxes, given by the coordinates of two corners."""
    corners = np.array([-2.0, -2.0, 2.0, 2.0], np.float32)
    return lambda w, x, y: 1 - ratio(jax.nn.sigmoid(x @ w) + corners, jnp.tanh(y) + corners).mean()


def by_coordinates(a: Any, b: Any) -> Any:
    (ax, ay, ax2, ay2), (bx, by, bx2, by2) = (tuple(z[..., k] for k in range(4)) for z in (a, b))
    both = jnp.maximum(jnp.minimum(ax2, bx2) - jnp.maximum(ax, bx), 0) * jnp.maximum(jnp.minimum(ay2, by2) - jnp.maximum(ay, by), 0)
    return both / (4 + (ax2 - ax) * (ay2 - ay) + (bx2 - bx) * (by2 - by) - both)


def by_sides(a: Any, b: Any) -> Any:
    sides = jnp.maximum(jnp.minimum(a[..., 2:], b[..., 2:]) - jnp.maximum(a[..., :2], b[..., :2]), 0)
    areas = [(z[..., 2] - z[..., 0]) * (z[..., 3] - z[..., 1]) for z in (a, b)]
    return sides[..., 0] * sides[..., 1] / (4 + sum(areas) - sides[..., 0] * sides[..., 1])


def by_corners(a: Any, b: Any) -> Any:
    both = jnp.maximum(jnp.minimum(a[..., 2:], b[..., 2:]) - jnp.maximum(a[..., :2], b[..., :2]), 0).prod(-1)
    areas = [(z[..., 2:] - z[..., :2]).prod(-1) for z in (a, b)]
    return both / (4 + sum(areas) - both)


def quantile(errors: Any, quantiles: Any) -> Any:
    return jnp.maximum(quantiles * errors, (quantiles - 1) * errors).mean()


def each_quantile(w: Any, x: Any, y: Any) -> Any:
    return jax.vmap(lambda x, y: quantile(y - x @ w, jnp.linspace(0.1, 0.9, w.shape[1])))(x, y).mean()


SUMMED = "a row's cotangents are summed over devices; rule: picked log-probabilities are logits less their logsumexp"

CLASSES: dict[str, Equivalence] = {
    "boxes": same(
        *("D 4", "B D", "B 4"), coordinates=boxes(by_coordinates), sides=boxes(by_sides), corners=boxes(by_corners),
        vmap=boxes(jax.vmap(by_coordinates)),
    ),
    "cross-entropy": same(
        *("D V", "B D", "B < V"),
        one_hot=one_hot, log_softmax=log_softmax, one_hot_log_softmax=one_hot_log_softmax, logsumexp=logsumexp, vmap=by_vmap,
        differences={"one hot log softmax": SUMMED},
    ),
    "cross-entropy of sequences": same(
        *("D V", "N S D", "N S < V"),
        whole=logsumexp,
        rows=lambda w, x, y: logsumexp(w, x.reshape(-1, x.shape[-1]), y.reshape(-1)),
        vmap=lambda w, x, y: jax.vmap(partial(logsumexp, w))(x, y).mean(),
        means=lambda w, x, y: jnp.mean(jnp.mean(jax.nn.logsumexp(x @ w, -1) - picked(x @ w, y), -1)),
    ),
    "masked cross-entropy": same(
        *("D V", "B D", "B < V", "B"), where=masked_where, product=masked_product, average=masked_average, dot=masked_dot,
    ),
    "smoothed labels": same(
        *("D V", "B D", "B < V"), targets=smooth_targets, parts=smooth_parts, logsumexp=smooth_logsumexp,
        differences=dict.fromkeys(["targets", "parts"], SUMMED),
    ),
    "distillation": same(
        *("D V", "B D", "B V"),
        difference=lambda w, x, t: distill(x @ w, t),
        entropies=lambda w, x, t: distill_entropies(x @ w, t),
        vmap=lambda w, x, t: distill_vmap(x @ w, t),
        differences=dict.fromkeys(
            ["difference", "entropies"], "the soft-max and its logarithm go through memory; rule: exp of log-soft-max"
        ),
    ),
    "contrastive": same(
        *("D D", "B D", "B D"), **contrast(lambda w, x, y: (x @ w) @ y.T),
        differences={"diagonal": "a branch over platforms reads all log-probabilities from memory; rule: it is a sum over a mask"},
    ),
    "squared error": same(
        *("D F", "B D", "B F"),
        mean=lambda w, x, y: jnp.mean((x @ w - y) ** 2),
        sum_by_n=lambda w, x, y: jnp.sum(jnp.square(x @ w - y)) / y.size,
        means=lambda w, x, y: jnp.square(x @ w - y).mean(-1).mean(0),
        vmap=lambda w, x, y: jax.vmap(lambda x, y: jnp.mean((x @ w - y) * (x @ w - y)))(x, y).mean(),
        vdot=lambda w, x, y: jnp.vdot(x @ w - y, x @ w - y) / y.size,
        einsum=lambda w, x, y: jnp.einsum("bf,bf->", x @ w - y, x @ w - y) / y.size,
    ),
    "absolute error": same(
        *("D F", "B D", "B F"),
        abs=lambda w, x, y: jnp.abs(x @ w - y).mean(),
        where=lambda w, x, y: jnp.where(x @ w > y, x @ w - y, y - x @ w).mean(),
        maximum=lambda w, x, y: jnp.maximum(x @ w - y, y - x @ w).mean(),
    ),
    "Huber loss": same(
        *("D F", "B D", "B F"),
        where=lambda w, x, y: (lambda e: jnp.where(e < 1, 0.5 * e * e, e - 0.5).mean())(jnp.abs(x @ w - y)),
        clip=lambda w, x, y: (lambda e: (lambda c: 0.5 * c * c + (e - c))(jnp.minimum(e, 1.0)).mean())(jnp.abs(x @ w - y)),
    ),
    "binary cross-entropy": same(
        *("D F", "B D", "B F"),
        log1p=lambda w, x, y: bits(x @ w, y),
        softplus=lambda w, x, y: jnp.mean(jax.nn.softplus(x @ w) - (x @ w) * y),
        log_sigmoid=lambda w, x, y: -jnp.mean(y * jax.nn.log_sigmoid(x @ w) + (1 - y) * jax.nn.log_sigmoid(-(x @ w))),
        logaddexp=lambda w, x, y: jnp.mean(jnp.logaddexp(0.0, x @ w) - (x @ w) * y),
    ),
    "cosine similarity": same(
        *("D F", "B D", "B F"),
        ratio=lambda w, x, y: (
            (x @ w * y).sum(-1) / jnp.sqrt((x @ w * (x @ w)).sum(-1) * (y * y).sum(-1))
        ).mean(),
        normalized=lambda w, x, y: (
            (x @ w / jnp.linalg.norm(x @ w, axis=-1, keepdims=True)) * (y / jnp.linalg.norm(y, axis=-1, keepdims=True))
        ).sum(-1).mean(),
        vmap=lambda w, x, y: jax.vmap(lambda p, y: p @ y / (jnp.linalg.norm(p) * jnp.linalg.norm(y)))(x @ w, y).mean(),
        differences={"normalized": "2·B·F divisions more; rule: a product of scaled vectors is a scaled product"},
    ),
    "overlap": same(
        *("D F", "B D", "B F"),
        sums=overlap(lambda p, y: ((p * y).sum(), p.sum() + y.sum())),
        vdot=overlap(lambda p, y: (jnp.vdot(p, y), jnp.sum(p) + jnp.sum(y))),
        rows=overlap(lambda p, y: ((p * y).sum(1).sum(), p.sum(1).sum() + y.sum(1).sum())),
        einsum=overlap(lambda p, y: (jnp.einsum("bf,bf->", p, y), jnp.einsum("bf->", p) + jnp.einsum("bf->", y))),
    ),
    "quantiles": same(
        *("D K", "B D", "B"),
        linspace=lambda w, x, y: quantile(y[:, None] - x @ w, jnp.linspace(0.1, 0.9, w.shape[1])),
        array=lambda w, x, y: quantile(y[:, None] - x @ w, np.linspace(0.1, 0.9, w.shape[1])),
        arange=lambda w, x, y: quantile(y[:, None] - x @ w, 0.1 + 0.8 * jnp.arange(w.shape[1]) / (w.shape[1] - 1)),
        vmap=each_quantile,
    ),
    "weight decay": same(
        *({"a": "D F", "b": "F D"}, "B D"),
        squares=lambda w, x: ((x @ w["a"]) @ w["b"]).mean() + sum((v * v).sum() for v in w.values()),
        vdot=lambda w, x: ((x @ w["a"]) @ w["b"]).mean() + sum(jnp.vdot(v, v) for v in w.values()),
        norms=lambda w, x: ((x @ w["a"]) @ w["b"]).mean() + jnp.linalg.norm(w["a"]) ** 2 + jnp.linalg.norm(w["b"]) ** 2,
        tree=lambda w, x: (
            ((x @ w["a"]) @ w["b"]).mean() + jax.tree.reduce(jnp.add, jax.tree.map(lambda v: jnp.sum(jnp.square(v)), w))
        ),
        differences={"norms": "each root needs its whole sum, one more all-reduce a weight; rule: the square of a square root"},
    ),
}  # fmt: skip
