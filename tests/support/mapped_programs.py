"""Losses with a `shard_map` inside, as people write them by hand: each idiom with the strategy that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

DEVICES = 4


@dataclass(frozen=True)
class Idiom:
    """A loss of some arguments.

    Attributes:
        loss: the loss as written by hand.
        shapes: the shapes of its arguments. The first `weights` are differentiated; names of integer arguments are in `indices`.
        weights: the number of differentiated arguments.
        indices: the bounds of integer arguments, by position.
    """

    loss: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]
    weights: int
    indices: dict[int, int]

    def arguments(self, seed: int = 0) -> list[jax.Array]:
        """Return random arguments."""
        arguments = []
        for k, (key, shape) in enumerate(zip(jax.random.split(jax.random.key(seed), len(self.shapes)), self.shapes, strict=True)):
            integers = k in self.indices
            values = jax.random.randint(key, shape, 0, self.indices[k]) if integers else jax.random.normal(key, shape)
            arguments.append(values if integers else values / shape[0] ** 0.5)
        return arguments


def _mapped(body: Callable[..., Any], into: Any, out: Any, n: int = DEVICES, **options: Any) -> Callable[..., Any]:
    mesh = jax.make_mesh((n,), ("x",), devices=jax.devices()[:n], axis_types=(AxisType.Auto,))
    return jax.shard_map(body, mesh=mesh, in_specs=into, out_specs=out, **options)


def _rotation(n: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % n) for i in range(n)]


def megatron(scale: int = 1, n: int = DEVICES) -> Idiom:
    """A perceptron with columns and rows of its weights divided, and one sum."""

    def body(a: Any, b: Any, x: Any) -> Any:
        return lax.psum(jax.nn.gelu(x @ a) @ b, "x")

    mapped = _mapped(body, (P(None, "x"), P("x"), P()), P(), n)
    d = 16 * scale
    return Idiom(lambda a, b, x: (mapped(a, b, x) ** 2).mean(), ((d, 4 * d), (4 * d, d), (d, d)), 2, {})


def ring_attention(scale: int = 1, n: int = DEVICES) -> Idiom:
    """Attention over a divided sequence: keys and values go round, with a running soft-max."""

    def body(w: Any, x: Any) -> Any:
        q, k, v = jnp.moveaxis((x @ w).reshape(*x.shape[:2], 3, -1), 2, 0)

        def step(carry: Any, _: Any) -> Any:
            k, v, largest, total, out = carry
            scores = jnp.einsum("bqd,bkd->bqk", q, k)
            new = jnp.maximum(largest, lax.stop_gradient(scores.max(-1)))
            weights, old = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)
            total, out = total * old + weights.sum(-1), out * old[..., None] + weights @ v
            k, v = (lax.ppermute(x, "x", _rotation(n)) for x in (k, v))
            return (k, v, new, total, out), None

        start = (k, v, lax.stop_gradient(q[..., 0]) * 0 - 1e30, q[..., 0] * 0, q * 0)
        (_, _, _, total, out), _ = lax.scan(step, start, None, length=n)
        return out / total[..., None]

    mapped = _mapped(body, (P(), P(None, "x")), P(None, "x"), n)
    d = 8 * scale
    return Idiom(lambda w, x: (mapped(w, x) ** 2).mean(), ((d, 3 * d), (2, 4 * d, d)), 1, {})


def ulysses(scale: int = 1, n: int = DEVICES) -> Idiom:
    """Attention over a divided sequence, which an all-to-all exchanges for divided heads."""

    def body(w: Any, x: Any) -> Any:
        q, k, v = jnp.moveaxis((x @ w).reshape(*x.shape[:2], 3, n, -1), 2, 0)
        q, k, v = (lax.all_to_all(x, "x", 2, 1, tiled=True) for x in (q, k, v))
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return lax.all_to_all(jnp.einsum("bhqk,bkhd->bqhd", scores, v), "x", 1, 2, tiled=True)

    mapped = _mapped(body, (P(), P(None, "x")), P(None, "x"), n)
    d = 16 * scale
    return Idiom(lambda w, x: (mapped(w, x) ** 2).mean(), ((d, 3 * d), (2, 2 * d, d)), 1, {})


def experts(scale: int = 1, n: int = DEVICES) -> Idiom:
    """A mixture of experts: tokens and experts divided, an all-to-all to the experts and back."""

    def body(gate: Any, up: Any, down: Any, x: Any) -> Any:
        scores = jax.nn.softmax(x @ gate)
        count, capacity = scores.shape[1], 2 * len(x) // scores.shape[1]
        chosen = jax.nn.one_hot(jnp.argmax(scores, -1), count, dtype=x.dtype)
        place = (jnp.cumsum(chosen, 0) - 1) * chosen
        dispatch = chosen[..., None] * jax.nn.one_hot(place, capacity, dtype=x.dtype)
        sent = jnp.einsum("tec,td->ecd", dispatch, x)
        mine = lax.all_to_all(sent, "x", 0, 1, tiled=True)
        done = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", mine, up)), down)
        back = lax.all_to_all(done, "x", 1, 0, tiled=True)
        return jnp.einsum("tec,ecd->td", dispatch * scores[..., None], back)

    mapped = _mapped(body, (P(), P("x"), P("x"), P("x")), P("x"), n)
    d, e = 8 * scale, 2 * n
    shapes = ((d, e), (e, d, 2 * d), (e, 2 * d, d), (8 * d, d))
    return Idiom(lambda g, u, w, x: (mapped(g, u, w, x) ** 2).mean(), shapes, 3, {})


def halo_exchange(scale: int = 1, n: int = DEVICES) -> Idiom:
    """A stencil on a divided grid: rows of the neighbours, zeros at the ends."""

    def body(w: Any, x: Any) -> Any:
        before = lax.ppermute(x[:, -1:], "x", [(i, i + 1) for i in range(n - 1)])
        after = lax.ppermute(x[:, :1], "x", [(i + 1, i) for i in range(n - 1)])
        rows = jnp.concatenate([before, x, after], 1)
        return w[0] * rows[:, :-2] + w[1] * rows[:, 1:-1] + w[2] * rows[:, 2:]

    mapped = _mapped(body, (P(), P(None, "x")), P(None, "x"), n)
    d = 16 * scale
    return Idiom(lambda w, x: (jnp.tanh(mapped(w, x)) ** 2).mean(), ((3, d), (4, d, d)), 1, {})


def embedding(scale: int = 1, n: int = DEVICES) -> Idiom:
    """A lookup in a table whose rows are divided: each device looks its own up, and a sum joins them."""

    def body(table: Any, tokens: Any) -> Any:
        local = tokens - lax.axis_index("x") * len(table)
        inside = (local >= 0) & (local < len(table))
        rows = jnp.where(inside[..., None], table[jnp.clip(local, 0, len(table) - 1)], 0)
        return lax.psum(rows, "x")

    mapped = _mapped(body, (P("x"), P()), P(), n)
    d = 16 * scale
    return Idiom(lambda t, i: (mapped(t, i) ** 2).mean(), ((4 * d, d), (4, d)), 1, {1: 4 * d})


def vocabulary_loss(scale: int = 1, n: int = DEVICES) -> Idiom:
    """A cross-entropy over a divided vocabulary: the largest and the sum over devices, never the logits."""

    def body(head: Any, x: Any, labels: Any) -> Any:
        logits = x @ head
        size = logits.shape[-1]
        largest = lax.pmax(lax.stop_gradient(logits.max(-1)), "x")
        total = lax.psum(jnp.exp(logits - largest[:, None]).sum(-1), "x")
        local = labels - lax.axis_index("x") * size
        inside = (local >= 0) & (local < size)
        own = jnp.take_along_axis(logits, jnp.clip(local, 0, size - 1)[:, None], 1)[:, 0]
        return (jnp.log(total) + largest - lax.psum(jnp.where(inside, own, 0), "x")).mean()

    mapped = _mapped(body, (P(None, "x"), P(), P()), P(), n)
    d = 16 * scale
    return Idiom(mapped, ((d, 8 * d), (2 * d, d), (2 * d,)), 1, {2: 8 * d})


def pipeline(scale: int = 1, n: int = DEVICES) -> Idiom:
    """Stages on devices: micro-batches go from each to the next by a ppermute in a loop."""

    def body(w: Any, x: Any) -> Any:
        stage, w = lax.axis_index("x"), w[0]

        def tick(carry: Any, t: Any) -> Any:
            state, out = carry
            fed = jnp.where(stage == 0, x[jnp.minimum(t, len(x) - 1)], state)
            y = jnp.tanh(fed @ w)
            slot = jnp.maximum(t - (n - 1), 0)
            out = jnp.where((stage == n - 1) & (t >= n - 1), out.at[slot].set(y), out)
            return (lax.ppermute(y, "x", _rotation(n)), out), None

        start = lax.pcast(jnp.zeros_like(x[0]), ("x",), to="varying"), lax.pcast(jnp.zeros_like(x), ("x",), to="varying")
        (_, out), _ = lax.scan(tick, start, jnp.arange(len(x) + n - 1))
        return lax.psum(jnp.where(stage == n - 1, out, 0), "x")

    mapped = _mapped(body, (P("x"), P()), P(), n)
    d = 8 * scale
    return Idiom(lambda w, x: (mapped(w, x) ** 2).mean(), ((n, d, d), (4, d, d)), 1, {})


def fsdp(scale: int = 1, n: int = DEVICES) -> Idiom:
    """Divided weights, gathered for each layer; their gradients are scattered sums."""

    def body(a: Any, b: Any, x: Any) -> Any:
        for w in (a, b):
            x = jnp.tanh(x @ lax.all_gather(w, "x", tiled=True))
        return lax.pmean((x**2).mean(), "x")

    d = 16 * scale
    return Idiom(_mapped(body, (P("x"), P("x"), P("x")), P(), n), ((d, d), (d, d), (4 * d, d)), 2, {})


def batch_norm(scale: int = 1, n: int = DEVICES) -> Idiom:
    """A divided batch, normalized by statistics of all of it."""

    def body(w: Any, scale: Any, x: Any) -> Any:
        y = x @ w
        mean = lax.pmean(y.mean(0), "x")
        variance = lax.pmean(((y - mean) ** 2).mean(0), "x")
        return lax.pmean((jax.nn.relu((y - mean) * lax.rsqrt(variance + 1e-5) * scale) ** 2).mean(), "x")

    d = 16 * scale
    return Idiom(_mapped(body, (P(), P(), P("x")), P(), n), ((d, d), (d,), (4 * d, d)), 2, {})


IDIOMS: dict[str, Callable[..., Idiom]] = {
    "Megatron perceptron": megatron,
    "ring attention": ring_attention,
    "Ulysses": ulysses,
    "mixture of experts": experts,
    "halo exchange": halo_exchange,
    "embedding lookup": embedding,
    "vocabulary-parallel loss": vocabulary_loss,
    "pipeline": pipeline,
    "FSDP by hand": fsdp,
    "batch norm": batch_norm,
}


def ragged_experts(w: Any, x: Any, n: int = DEVICES) -> jax.Array:
    """The loss of a mixture of one expert a device: tokens sorted by expert, exchanged by ragged all-to-alls, none dropped."""

    def body(gate: Any, up: Any, down: Any, x: Any) -> Any:
        chosen = jnp.argmax(x @ gate, -1)
        order = jnp.argsort(chosen)
        sent = lax.all_gather(jnp.bincount(chosen, length=n).astype(jnp.int32), "x")  # [from, to]
        rows, columns = jnp.cumsum(sent, 1) - sent, jnp.cumsum(sent, 0) - sent
        me = lax.axis_index("x")
        there = rows[me], sent[me], columns[me], sent[:, me]
        mine = lax.ragged_all_to_all(x[order], jnp.zeros((n * len(x), x.shape[1])), *there, axis_name="x")
        done = jax.nn.gelu(mine @ up[0]) @ down[0]
        back = columns[:, me], sent[:, me], rows[:, me], sent[me]
        return jnp.zeros_like(x).at[order].set(lax.ragged_all_to_all(done, jnp.zeros_like(x), *back, axis_name="x"))

    mapped = _mapped(body, (P(), P("x"), P("x"), P("x")), P("x"), n, check_vma=False)
    return (mapped(*w, x) ** 2).mean()
