"""Comparisons of pairs of samples or of distributions, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.equivalent.forms import Equivalence, same
from benchmarks.equivalent.lookups import loss
from benchmarks.equivalent.loops import by_fori_times, by_scan_times, repeated

TOWERS = {"a": "D C", "b": "D C"}


def towers(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda w, x, y: compare(jnp.tanh(x @ w["a"]), jnp.tanh(y @ w["b"]))


def both_axes(a: Any, b: Any) -> Any:
    logits, n = a @ b.T, jnp.arange(len(a))
    return -(jax.nn.log_softmax(logits, 1)[n, n].mean() + jax.nn.log_softmax(logits, 0)[n, n].mean()) / 2


def both_orders(a: Any, b: Any) -> Any:
    logits, n = a @ b.T, jnp.arange(len(a))
    return (loss(logits, n).mean() + loss(logits.T, n).mean()) / 2


def both_sums(a: Any, b: Any) -> Any:
    logits = a @ b.T
    return (jax.nn.logsumexp(logits, 1) / 2 + jax.nn.logsumexp(logits, 0) / 2 - (a * b).sum(-1)).mean()


def both_products(a: Any, b: Any) -> Any:
    n = jnp.arange(len(a))
    return (loss(a @ b.T, n).mean() + loss(b @ a.T, n).mean()) / 2


def discrepancy(kernel: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """The maximum mean discrepancy of two sets."""
    return lambda w, x, y: (lambda a, b: kernel(a, a).mean() + kernel(b, b).mean() - 2 * kernel(a, b).mean())(x @ w, y @ w)


def expanded(a: Any, b: Any) -> Any:
    return jnp.exp(-0.01 * ((a * a).sum(-1)[:, None] - 2 * a @ b.T + (b * b).sum(-1)[None]))


def by_einsum(a: Any, b: Any) -> Any:
    squares = jnp.einsum("ik,ik->i", a, a)[:, None] + jnp.einsum("jk,jk->j", b, b)
    return jnp.exp(-0.01 * (squares - 2 * jnp.einsum("ik,jk->ij", a, b)))


def by_vmap(a: Any, b: Any) -> Any:
    return jax.vmap(lambda u: jax.vmap(lambda v: jnp.exp(-0.01 * (u @ u - 2 * u @ v + v @ v)))(b))(a)


def triplet(a: Any, p: Any, n: Any) -> Any:
    return jax.nn.relu(jnp.square(a - p).sum(-1) - jnp.square(a - n).sum(-1) + 0.2).mean()


def triplet_vmap(w: Any, a: Any, p: Any, n: Any) -> Any:
    def one(*samples: Any) -> Any:
        a, p, n = (jnp.tanh(x @ w) for x in samples)
        return jax.nn.relu(jnp.vdot(a - p, a - p) - jnp.vdot(a - n, a - n) + 0.2)

    return jax.vmap(one)(a, p, n).mean()


def products_of_differences(x: Any, y: Any) -> Any:
    p, q = jax.nn.softmax(x), jax.nn.softmax(y)
    return ((p - q) * (jax.nn.log_softmax(x) - jax.nn.log_softmax(y))).sum(-1).mean()


def two_divergences(x: Any, y: Any) -> Any:
    a, b = jax.nn.log_softmax(x), jax.nn.log_softmax(y)
    return (jnp.exp(a) * (a - b)).sum(-1).mean() + (jnp.exp(b) * (b - a)).sum(-1).mean()


def each_divergence(x: Any, y: Any) -> Any:
    def one(x: Any, y: Any) -> Any:
        a, b = jax.nn.log_softmax(x), jax.nn.log_softmax(y)
        return jnp.sum((jnp.exp(a) - jnp.exp(b)) * (a - b))

    return jax.vmap(one)(x, y).mean()


def orthogonal(loop: Callable[..., Any], step: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """A product with a weight after some steps of Newton and Schulz to the nearest orthogonal matrix."""
    return lambda w, x: jnp.square(x @ loop(step, w / jnp.linalg.norm(w))).mean()


def newton(a: Any) -> Any:
    return 1.5 * a - 0.5 * ((a @ a.T) @ a)


def newton_einsum(a: Any) -> Any:
    return 1.5 * a - 0.5 * jnp.einsum("ik,kl->il", jnp.einsum("ij,kj->ik", a, a), a)


CRITIC = {"a": "D F", "b": "F"}


def critic(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w["a"]) @ w["b"]


def penalty(gradients: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.square(jnp.linalg.norm(gradients(w, x), axis=-1) - 1).mean()


def queued(losses: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any, Any], Any]:
    """InfoNCE of samples against a key of each, and a queue of other keys."""
    return lambda w, x, k, q: losses(x @ w / jnp.linalg.norm(x @ w, axis=-1, keepdims=True), k, q).mean()


def joined_logits(z: Any, k: Any, q: Any) -> Any:
    logits = jnp.concatenate([(z * k).sum(-1, keepdims=True), z @ q.T], 1) / 0.07
    return jax.nn.logsumexp(logits, -1) - logits[:, 0]


def einsum_logits(z: Any, k: Any, q: Any) -> Any:
    logits = jnp.concatenate([jnp.einsum("nc,nc->n", z, k)[:, None], jnp.einsum("nc,kc->nk", z, q)], 1) / 0.07
    return jax.nn.logsumexp(logits, -1) - logits[:, 0]


def each_logits(z: Any, k: Any, q: Any) -> Any:
    def one(z: Any, k: Any) -> Any:
        logits = jnp.concatenate([(z @ k)[None], q @ z]) / 0.07
        return jax.nn.logsumexp(logits) - logits[0]

    return jax.vmap(one)(z, k)


CLASSES: dict[str, Equivalence] = {
    "contrastive, a queue": same(
        *("D K", "B D", "B K", "P K"), concatenated=queued(joined_logits), einsum=queued(einsum_logits), vmap=queued(each_logits),
    ),
    "contrastive, both ways": same(
        *(TOWERS, "B D", "B D"),
        axes=towers(both_axes), transposed=towers(both_orders), logsumexp=towers(both_sums), two_products=towers(both_products),
        differences={
            "two products": "similarities are computed twice; rule: operands in the other order give the transpose",
            "axes": "a row's cotangents are summed over devices; rule: picked log-probabilities are logits less their logsumexp",
            "logsumexp": "sums of rows and of columns meet as vectors, which are sent; rule: a mean of sums is a sum of means",
        },
    ),
    "distances of two sets": same(
        *("D K", "P D", "P D"), expanded=discrepancy(expanded), einsum=discrepancy(by_einsum), vmap=discrepancy(by_vmap),
        differences=dict.fromkeys(["expanded", "vmap"], "an operator more scales them; rule: a scale moves through a product"),
    ),
    "triplets": same(
        *("D F", "B D", "B D", "B D"),
        separate=lambda w, a, p, n: triplet(*(jnp.tanh(x @ w) for x in (a, p, n))),
        vmap=triplet_vmap,
        concatenated=lambda w, *x: triplet(*jnp.split(jnp.tanh(jnp.concatenate(x) @ w), 3)),
        stacked=lambda w, *x: triplet(*jnp.tanh(jnp.stack(x) @ w)),
        differences=dict.fromkeys(
            ["concatenated", "stacked"], "samples are joined in memory; rule: a product of concatenations is one of each"
        ),
    ),
    "divergence, both ways": same(
        *("D V", "B D", "B V"),
        two=lambda w, x, t: two_divergences(x @ w, t), vmap=lambda w, x, t: each_divergence(x @ w, t),
        products=lambda w, x, t: products_of_differences(x @ w, t),
        differences={"products": "the soft-max and its logarithm go through memory; rule: exp of log-soft-max"},
    ),
    "orthogonalization": same(
        *("D D", "B D"),
        unrolled=orthogonal(repeated, newton), fori=orthogonal(by_fori_times, newton), scan=orthogonal(by_scan_times, newton),
        einsum=orthogonal(by_scan_times, newton_einsum),
        differences=dict.fromkeys(
            ("fori", "scan", "einsum"), "all steps gather, and stack what derivatives read; rule: written-out-loop"
        ),
    ),
    "gradient penalty": same(
        *(CRITIC, "B D"),
        vmap=penalty(jax.vmap(jax.grad(critic, 1), (None, 0))),
        sum=penalty(lambda w, x: jax.grad(lambda x: critic(w, x).sum())(x)),
        vjp=penalty(lambda w, x: jax.vjp(lambda x: critic(w, x), x)[1](jnp.ones(len(x), x.dtype))[0]),
        jacobian=penalty(lambda w, x: jax.vmap(jax.jacrev(lambda x: critic(w, x)))(x)),
    ),
    "mixed samples": same(
        *("D V", "B D", "B V"),
        flip=lambda w, x, y: mixed(lambda x: jnp.flip(x, 0), w, x, y),
        slice=lambda w, x, y: mixed(lambda x: x[::-1], w, x, y),
        rev=lambda w, x, y: mixed(lambda x: lax.rev(x, (0,)), w, x, y),
    ),
}  # fmt: skip


def mixed(other: Callable[[Any], Any], w: Any, x: Any, y: Any) -> Any:
    """Cross-entropy of mixtures of two samples and of their labels."""
    x, y = (0.7 * v + 0.3 * other(v) for v in (x, y))
    return -(jax.nn.log_softmax(x @ w) * y).sum(-1).mean()
