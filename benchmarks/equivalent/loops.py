"""Recurrences, stacks of layers and micro-batches: loops, as people write them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.equivalent.forms import Equivalence, Form, same
from benchmarks.equivalent.losses import logsumexp

Layer = Callable[[Any, Any], Any]


def residual(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def block(w: Any, x: Any) -> Any:
    """A pre-norm layer of attention and a feed-forward layer."""
    x = x + jnp.einsum(
        "nshc,hcd->nsd", jax.nn.dot_product_attention(*(jnp.einsum("nsd,dhc->nshc", x, w[k]) for k in "qkv")), w["o"]
    )
    return x + jax.nn.gelu((x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)) @ w["up"]) @ w["down"]


def plain(layer: Layer) -> Layer:
    return layer


def layers(w: Any) -> list[Any]:
    return [jax.tree.map(operator.itemgetter(k), w) for k in range(len(jax.tree.leaves(w)[0]))]


def by_scan(layer: Layer, w: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


def by_fori(layer: Layer, w: Any, x: Any) -> Any:
    n = len(jax.tree.leaves(w)[0])
    return lax.fori_loop(0, n, lambda k, x: layer(jax.tree.map(lambda v: v[k], w), x), x)


def by_hand(layer: Layer, w: Any, x: Any) -> Any:
    for one in layers(w):
        x = layer(one, x)
    return x


def listed(layer: Layer, w: Any, x: Any) -> Any:
    for one in w:
        x = layer(one, x)
    return x


def by_index(layer: Layer, w: Any, x: Any) -> Any:
    n = len(jax.tree.leaves(w)[0])
    return lax.scan(lambda x, k: (layer(jax.tree.map(lambda v: v[k], w), x), None), x, jnp.arange(n))[0]


def in_groups(layer: Layer, w: Any, x: Any) -> Any:
    """Two layers in every step."""
    half = jax.tree.map(lambda v: v.reshape(-1, 3, *v.shape[1:]), w)
    return lax.scan(lambda x, w: (by_hand(layer, w, x), None), x, half)[0]


def stack(layer: Layer, *, remat: bool = False) -> dict[str, Any]:
    one = jax.checkpoint(layer) if remat else layer

    def loss(walk: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        return lambda w, x: jnp.square(walk(one, w, x)).mean()

    return {
        "scan": loss(by_scan), "fori": loss(by_fori), "unrolled": loss(by_hand), "index": loss(by_index),
        "groups": loss(in_groups), "list": Form(loss(listed), lambda w, x: (layers(w), x)),
    }  # fmt: skip


TIMES = 6  # how often a step is repeated


def repeated(step: Callable[[Any], Any], x: Any) -> Any:
    for _ in range(TIMES):
        x = step(x)
    return x


def by_fori_times(step: Callable[[Any], Any], x: Any) -> Any:
    return lax.fori_loop(0, TIMES, lambda _, x: step(x), x)


def by_scan_times(step: Callable[[Any], Any], x: Any) -> Any:
    return lax.scan(lambda x, _: (step(x), None), x, None, length=TIMES)[0]


def shared(loop: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """A layer that is repeated with the same weights."""
    return lambda w, x: jnp.square(loop(lambda x: residual(w, x), x)).mean()


def discounted(sums: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Discounted sums of what follows, of a linear function."""
    return lambda w, x: jnp.square(sums(jnp.tanh(jnp.einsum("btd,d->bt", x, w)))).mean()


def backward(r: Any) -> Any:
    return lax.scan(lambda g, r: (r + 0.9 * g,) * 2, jnp.zeros_like(r[:, 0]), r.T, reverse=True)[1].T


def flipped(r: Any) -> Any:
    return lax.scan(lambda g, r: (r + 0.9 * g,) * 2, jnp.zeros_like(r[:, 0]), r.T[::-1])[1][::-1].T


def each_backward(r: Any) -> Any:
    return jax.vmap(lambda r: lax.scan(lambda g, r: (r + 0.9 * g,) * 2, jnp.zeros((), r.dtype), r, reverse=True)[1])(r)


PATHS = ({"emit": "D C", "move": "C C"}, "B T D")


def paths_batch(w: Any, x: Any) -> Any:
    """The logarithm of the sum over all paths of a linear chain (a CRF's normalizer)."""
    emit = jnp.swapaxes(x @ w["emit"], 0, 1)
    step = lambda a, e: (jax.nn.logsumexp(a[:, :, None] + w["move"], 1) + e, None)  # noqa: E731
    return jax.nn.logsumexp(lax.scan(step, emit[0], emit[1:])[0], -1).mean()


def paths_vmap(w: Any, x: Any) -> Any:
    def one(emit: Any) -> Any:
        step = lambda a, e: (jax.nn.logsumexp(a[:, None] + w["move"], 0) + e, None)  # noqa: E731
        return jax.nn.logsumexp(lax.scan(step, emit[0], emit[1:])[0])

    return jax.vmap(one)(x @ w["emit"]).mean()


def paths_fori(w: Any, x: Any) -> Any:
    emit = x @ w["emit"]
    step = lambda t, a: jax.nn.logsumexp(a[:, :, None] + w["move"], 1) + emit[:, t]  # noqa: E731
    return jax.nn.logsumexp(lax.fori_loop(1, x.shape[1], step, emit[:, 0]), -1).mean()


BLOCK = {"q": "L D H C", "k": "L D H C", "v": "L D H C", "o": "L H C D", "up": "L D F", "down": "L F D"}
BATCHES = ("D V", "M B D", "M B < V")


def carried(w: Any, xs: Any, ys: Any) -> Any:
    return lax.scan(lambda total, one: (total + logsumexp(w, *one), None), 0.0, (xs, ys))[0]


def stacked(w: Any, xs: Any, ys: Any) -> Any:
    return lax.scan(lambda c, one: (c, logsumexp(w, *one)), None, (xs, ys))[1].sum()


def by_fori_sum(w: Any, xs: Any, ys: Any) -> Any:
    return lax.fori_loop(0, len(xs), lambda k, total: total + logsumexp(w, xs[k], ys[k]), jnp.zeros((), xs.dtype))


RNN = ({"x": "D D", "h": "D D"}, "B T D")


def cell(w: Any, h: Any, x: Any) -> Any:
    return jnp.tanh(x @ w["x"] + h @ w["h"])


def rnn_batch(w: Any, x: Any) -> Any:
    h = lax.scan(lambda h, x: (cell(w, h, x), None), jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))[0]
    return jnp.square(h).mean()


def rnn_vmap(w: Any, x: Any) -> Any:
    def one(x: Any) -> Any:
        return lax.scan(lambda h, x: (cell(w, h, x), None), jnp.zeros_like(x[0]), x)[0]

    return jnp.square(jax.vmap(one)(x)).mean()


def rnn_fori(w: Any, x: Any) -> Any:
    return jnp.square(lax.fori_loop(0, x.shape[1], lambda t, h: cell(w, h, x[:, t]), jnp.zeros_like(x[:, 0]))).mean()


def rnn_joined(w: Any, x: Any) -> Any:
    joined = jnp.concatenate([w["x"], w["h"]])

    def step(h: Any, x: Any) -> tuple[Any, None]:
        return jnp.tanh(jnp.concatenate([x, h], 1) @ joined), None

    return jnp.square(lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))[0]).mean()


def rnn_hoisted(w: Any, x: Any) -> Any:
    inputs = jnp.swapaxes(x @ w["x"], 0, 1)
    return jnp.square(lax.scan(lambda h, p: (jnp.tanh(p + h @ w["h"]), None), jnp.zeros_like(x[:, 0]), inputs)[0]).mean()


LSTM = ({"x": "D 4 D", "h": "D 4 D"}, "B T D")


def lstm(products: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def loss(w: Any, x: Any) -> Any:
        def step(carry: Any, x: Any) -> tuple[Any, None]:
            h, c = carry
            i, f, g, o = products(w, x, h)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zero = jnp.zeros_like(x[:, 0])
        return jnp.square(lax.scan(step, (zero, zero), jnp.swapaxes(x, 0, 1))[0][0]).mean()

    return loss


def flat(w: Any) -> Any:
    return w.reshape(w.shape[0], -1)


def decayed(w: Any, x: Any) -> Any:
    """A linear recurrence h = a · h + x, whose a is learned, by a loop."""
    a = jax.nn.sigmoid(w)
    start = jnp.zeros_like(x[:, 0])
    return jnp.square(lax.scan(lambda h, x: (a * h + x, a * h + x), start, jnp.swapaxes(x, 0, 1))[1]).mean()


def decayed_vmap(w: Any, x: Any) -> Any:
    def one(x: Any) -> Any:
        return lax.scan(lambda h, x: (jax.nn.sigmoid(w) * h + x,) * 2, jnp.zeros_like(x[0]), x)[1]

    return jnp.square(jax.vmap(one)(x)).mean()


def decayed_tree(w: Any, x: Any) -> Any:
    def join(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return jnp.square(lax.associative_scan(join, (jnp.broadcast_to(jax.nn.sigmoid(w), x.shape), x), axis=1)[1]).mean()


def summed(cumulate: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.tanh(cumulate(x @ w)).mean()


def running(x: Any) -> Any:
    x = jnp.swapaxes(x, 0, 1)
    return jnp.swapaxes(lax.scan(lambda h, x: (h + x, h + x), jnp.zeros_like(x[0]), x)[1], 0, 1)


def masked_sum(x: Any) -> Any:
    return jnp.einsum("ts,bsd->btd", jnp.tril(jnp.ones((x.shape[1],) * 2, x.dtype)), x)


def written(loop: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A layer after the states of all steps of a recurrence."""

    def loss(w: Any, x: Any) -> Any:
        states = loop(lambda h, x: jnp.tanh(h @ w["h"] + x), jnp.zeros_like(x[:, 0] @ w["x"]), x @ w["x"])
        return jnp.tanh(states @ w["out"]).mean()

    return loss


def stacked_steps(step: Any, h: Any, x: Any) -> Any:
    return jnp.swapaxes(lax.scan(lambda h, x: (step(h, x),) * 2, h, jnp.swapaxes(x, 0, 1))[1], 0, 1)


def set_steps(step: Any, h: Any, x: Any) -> Any:
    def one(t: Any, carry: Any) -> Any:
        h = step(carry[0], x[:, t])
        return h, carry[1].at[:, t].set(h)

    return lax.fori_loop(0, x.shape[1], one, (h, jnp.zeros((*x.shape[:2], h.shape[-1]), x.dtype)))[1]


def updated_steps(step: Any, h: Any, x: Any) -> Any:
    def one(carry: Any, t: Any) -> Any:
        h = step(carry[0], lax.dynamic_index_in_dim(x, t, 1, keepdims=False))
        return (h, lax.dynamic_update_index_in_dim(carry[1], h, t, 0)), None

    states = jnp.zeros((x.shape[1], *h.shape), x.dtype)
    return jnp.swapaxes(lax.scan(one, (h, states), jnp.arange(x.shape[1]))[0][1], 0, 1)


def each_step(step: Any, h: Any, x: Any) -> Any:
    return jax.vmap(lambda h, x: lax.scan(lambda h, x: (step(h[None], x)[0],) * 2, h, x)[1])(h, x)


def added(terms: Iterable[jax.Array]) -> jax.Array:
    return reduce(operator.add, terms)


def sample_loss(w: Any, x: Any, y: Any) -> Any:
    return jnp.square(jnp.tanh(x @ w["up"]) @ w["down"] - y).mean()


ENSEMBLE = ({"up": "M D F", "down": "M F D"}, "B D")


CLASSES: dict[str, Equivalence] = {
    "residual layers": same(
        *({"up": "L D F", "down": "L F D"}, "B D"), **stack(residual),
        differences=dict.fromkeys(
            ["list"], "gradients are summed layer by layer, in 2·L collectives for two: they are too large to be merged"
        ),
    ),
    "residual layers, recomputed": same(
        *({"up": "L D F", "down": "L F D"}, "B D"), **stack(residual, remat=True),
        differences=dict.fromkeys(
            ["list"], "gradients are summed layer by layer, in 2·L collectives for two: inside remat none are combined"
        ),
    ),
    "transformer": same(*(BLOCK, "N S D"), **stack(block)),
    "micro-batches": same(
        *BATCHES,
        vmap=lambda w, xs, ys: jax.vmap(partial(logsumexp, w))(xs, ys).sum(),
        map=lambda w, xs, ys: lax.map(lambda one: logsumexp(w, *one), (xs, ys)).sum(),
        carried=carried, stacked=stacked, fori=by_fori_sum,
        unrolled=lambda w, xs, ys: sum(logsumexp(w, xs[k], ys[k]) for k in range(len(xs))),
        differences=dict.fromkeys(
            ["map", "carried", "stacked", "fori"], "the weight's gradient is added in memory in every step"
        ) | {"unrolled": "the soft-max sums over devices in every step, M times as often"},
    ),
    "samples": same(
        *({"up": "D F", "down": "F D"}, "B D", "B D"),
        batch=sample_loss,
        vmap=lambda w, x, y: jax.vmap(partial(sample_loss, w))(x, y).mean(),
        tuple=Form(lambda w, xy: sample_loss(w, *xy), lambda w, x, y: (w, (x, y))),
        dict=Form(lambda w, d: sample_loss(w, d["x"], d["y"]), lambda w, x, y: (w, {"x": x, "y": y})),
        stacked=Form(lambda w, xy: sample_loss(w, xy[:, 0], xy[:, 1]), lambda w, x, y: (w, jnp.stack([x, y], 1))),
        concatenated=Form(
            lambda w, xy: sample_loss(w, xy[:, : xy.shape[1] // 2], xy[:, xy.shape[1] // 2 :]),
            lambda w, x, y: (w, jnp.concatenate([x, y], 1)),
        ),
    ),
    "ensemble": same(
        *ENSEMBLE,
        vmap=lambda w, x: jax.vmap(lambda w: jnp.square(jnp.tanh(x @ w["up"]) @ w["down"]).mean())(w).sum(),
        einsum=lambda w, x: jnp.square(
            jnp.einsum("mbf,mfd->mbd", jnp.tanh(jnp.einsum("bd,mdf->mbf", x, w["up"])), w["down"])
        ).mean((1, 2)).sum(),
        unrolled=lambda w, x: added(jnp.square(jnp.tanh(x @ v["up"]) @ v["down"]).mean() for v in layers(w)),
        list=Form(
            lambda w, x: added(jnp.square(jnp.tanh(x @ v["up"]) @ v["down"]).mean() for v in w), lambda w, x: (layers(w), x)
        ),
        map=lambda w, x: lax.map(lambda v: jnp.square(jnp.tanh(x @ v["up"]) @ v["down"]).mean(), w).sum(),
        differences=dict.fromkeys(
            ["unrolled", "list", "map"],
            "member after member, not divided over devices (branches are); rule: equal products are one batched product",
        ),
    ),
    "recurrence": same(
        *RNN, time_major=rnn_batch, vmap=rnn_vmap, fori=rnn_fori, joined=rnn_joined, hoisted=rnn_hoisted,
        differences={
            "joined": "input and state are joined in every step; rule: a product of concatenations is a sum of products",
            "hoisted": "the inputs' products of all steps go through memory; rule: a product moves out of a loop",
        },
    ),
    "LSTM": same(
        *LSTM,
        one_product=lstm(lambda w, x, h: jnp.split(x @ flat(w["x"]) + h @ flat(w["h"]), 4, -1)),
        einsum=lstm(
            lambda w, x, h: jnp.moveaxis(jnp.einsum("bd,dge->bge", x, w["x"]) + jnp.einsum("bd,dge->bge", h, w["h"]), 1, 0)
        ),
        sliced=lstm(lambda w, x, h: [x @ w["x"][:, k] + h @ w["h"][:, k] for k in range(4)]),
        separate=Form(
            lstm(lambda w, x, h: [x @ a + h @ b for a, b in w]),
            lambda w, x: ([(w["x"][:, k], w["h"][:, k]) for k in range(4)], x),
        ),
        differences=dict.fromkeys(
            ["one product", "einsum", "sliced"], "gates are cut out; rule: a part of a product is a product of a part"
        ),
    ),
    "linear recurrence": same(
        *("D", "B T D"), scan=decayed, vmap=decayed_vmap, associative=decayed_tree,
        differences=dict.fromkeys(
            ["scan", "vmap"], "T steps, each through memory, for log T passes; rule: a linear recurrence is an associative scan"
        ),
    ),
    "shared layers": same(
        *({"up": "D F", "down": "F D"}, "B D"), unrolled=shared(repeated), fori=shared(by_fori_times), scan=shared(by_scan_times),
    ),
    "discounted returns": same(
        *("D", "B T D"), backward=discounted(backward), flipped=discounted(flipped), vmap=discounted(each_backward),
    ),
    "paths of a chain": same(
        *PATHS, batch=paths_batch, vmap=paths_vmap, fori=paths_fori,
    ),
    "states of all steps": same(
        *({"x": "D D", "h": "D D", "out": "D F"}, "B T D"),
        scan=written(stacked_steps), fori=written(set_steps), updated=written(updated_steps), vmap=written(each_step),
    ),
    "running sum": same(
        *("D D", "B T D"),
        cumsum=summed(lambda x: jnp.cumsum(x, 1)), scan=summed(running), triangle=summed(masked_sum),
        vmap=summed(jax.vmap(lambda x: jnp.cumsum(x, 0))),
        differences={"triangle": "a product of T operations an element", "scan": "the sum is read and written in every step"},
    ),
}  # fmt: skip
