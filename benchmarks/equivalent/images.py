"""Convolutions, poolings, mixtures of experts and sums over segments, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.equivalent.forms import Equivalence, Form, same

LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def conv(x: Any, w: Any, stride: int = 1, padding: str = "SAME", groups: int = 1) -> Any:
    return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=LAST, feature_group_count=groups)


def channels_first(w: Any, x: Any) -> Any:
    x, w = x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=FIRST).transpose(0, 2, 3, 1)


def patched(w: Any, x: Any) -> Any:
    """Patches of 8 by 8, each flattened."""
    n, height, width, channels = x.shape
    p = x.reshape(n, height // 8, 8, width // 8, 8, channels).transpose(0, 1, 3, 2, 4, 5)
    return p.reshape(n, height // 8, width // 8, -1) @ w.reshape(-1, w.shape[-1])


def patched_einsum(w: Any, x: Any) -> Any:
    n, height, width, channels = x.shape
    return jnp.einsum("nhpwqc,pqco->nhwo", x.reshape(n, height // 8, 8, width // 8, 8, channels), w)


def shifted(w: Any, x: Any) -> Any:
    """A depth-wise convolution as a sum of shifted images."""
    size = x.shape[1]
    wide = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return sum(wide[:, i : i + size, j : j + size] * w[i, j, 0] for i in range(3) for j in range(3))


def after(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.tanh(fn(w, x)).mean()


def pooled(pool: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.tanh(pool(conv(x, w))).mean()


def window(x: Any, init: Any, combine: Any) -> Any:
    return lax.reduce_window(x, init, combine, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def blocks(x: Any) -> Any:
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels)


def corners(x: Any) -> list[Any]:
    return [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]


MIXTURE = ({"gate": "D E", "up": "E D F", "down": "E F D"}, "B D")


def mixed(experts: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.square(experts(w, x, jax.nn.softmax(x @ w["gate"]))).mean()


def expert(up: Any, down: Any, x: Any) -> Any:
    return jax.nn.relu(x @ up) @ down


def scanned_experts(w: Any, x: Any, gates: Any) -> Any:
    def step(total: Any, one: Any) -> tuple[Any, None]:
        up, down, gate = one
        return total + gate[:, None] * expert(up, down, x), None

    return lax.scan(step, jnp.zeros_like(x), (w["up"], w["down"], gates.T))[0]


def listed_experts(w: Any, x: Any, gates: Any) -> Any:
    return sum(gates[:, k, None] * expert(up, down, x) for k, (up, down) in enumerate(w["experts"]))


def all_experts(w: Any, x: Any, gates: Any) -> Any:
    hidden = jax.nn.relu(jnp.einsum("bd,edf->bef", x, w["up"])) * gates[..., None]
    return jnp.einsum("bef,efd->bd", hidden, w["down"])


def routed(dispatch: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Each token's best expert, at most P tokens each, in the order of the tokens."""

    def loss(w: Any, x: Any) -> Any:
        probabilities = jax.nn.softmax(x @ w["gate"])
        best = jnp.argmax(probabilities, -1)
        chosen = jax.nn.one_hot(best, probabilities.shape[-1], dtype=x.dtype)
        place = ((jnp.cumsum(chosen, 0) - 1) * chosen).sum(-1).astype(jnp.int32)
        weight = (probabilities * chosen).sum(-1)
        return jnp.square(dispatch(w, x, chosen, best, place) * weight[:, None]).mean()

    return loss


def capacity(x: Any, w: Any) -> int:
    return 2 * len(x) // len(w["up"])


def by_einsum(w: Any, x: Any, chosen: Any, best: Any, place: Any) -> Any:
    slots = chosen[..., None] * jax.nn.one_hot(place, capacity(x, w), dtype=x.dtype)[:, None]
    inputs = jnp.einsum("bep,bd->epd", slots, x)
    return jnp.einsum("bep,epd->bd", slots, jax.vmap(expert)(w["up"], w["down"], inputs))


def by_einsum_experts(w: Any, x: Any, chosen: Any, best: Any, place: Any) -> Any:
    slots = jnp.einsum("be,bp->bep", chosen, jax.nn.one_hot(place, capacity(x, w), dtype=x.dtype))
    hidden = jax.nn.relu(jnp.einsum("epd,edf->epf", jnp.einsum("bep,bd->epd", slots, x), w["up"]))
    return jnp.einsum("bep,epd->bd", slots, jnp.einsum("epf,efd->epd", hidden, w["down"]))


def by_scatter(w: Any, x: Any, chosen: Any, best: Any, place: Any) -> Any:
    inputs = jnp.zeros((len(w["up"]), capacity(x, w), x.shape[1]), x.dtype).at[best, place].add(x, mode="drop")
    return jax.vmap(expert)(w["up"], w["down"], inputs).at[best, place].get(mode="fill", fill_value=0)


SEGMENTS = ("D D", "B D", "B < S")


def slice_along(x: Any, dim: int, start: int, stop: int | None) -> Any:
    return lax.slice_in_dim(x, start, stop, axis=dim)


def variation(y: Any, differences: Callable[[Any, int], Any], first: int = 1) -> Any:
    """How much pixels differ from their neighbours below and beside them."""
    return jnp.abs(differences(y, first)).mean() + jnp.abs(differences(y, first + 1)).mean()


def gathered(total: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda w, x, i: jnp.tanh(total(x @ w, i)).mean()


PIXELS = ("3 3 A O", "N I I A")

CLASSES: dict[str, Equivalence] = {
    "convolution": same(
        *PIXELS,
        last=after(lambda w, x: conv(x, w)), first=after(channels_first),
        vmap=after(lambda w, x: jax.vmap(lambda x: conv(x[None], w)[0])(x)),
        padded=after(lambda w, x: conv(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), w, padding="VALID")),
    ),
    "total variation": same(
        *PIXELS,
        slices=lambda w, x: variation(conv(x, w), lambda y, k: slice_along(y, k, 1, None) - slice_along(y, k, 0, -1)),
        diff=lambda w, x: variation(conv(x, w), lambda y, k: jnp.diff(y, axis=k)),
        rolled=lambda w, x: variation(conv(x, w), lambda y, k: slice_along(y - jnp.roll(y, 1, k), k, 1, None)),
        vmap=lambda w, x: jax.vmap(lambda y: variation(y, lambda y, k: jnp.diff(y, axis=k), 0))(conv(x, w)).mean(),
    ),
    "1 x 1 convolution": same(
        *("A O", "N I I A"),
        conv=after(lambda w, x: conv(x, w[None, None])), matmul=after(lambda w, x: x @ w),
        einsum=after(lambda w, x: jnp.einsum("nhwa,ao->nhwo", x, w)),
        rows=after(lambda w, x: (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:3], -1)),
    ),
    "patches": same(
        *("8 8 3 D", "N I I 3"),
        conv=after(lambda w, x: conv(x, w, 8, "VALID")), reshape=after(patched), einsum=after(patched_einsum),
        differences={"reshape": "pixels are transposed in memory; rule: a product of patches is a convolution"},
    ),
    "depth-wise convolution": same(
        *("3 3 1 A", "N I I A"),
        conv=after(lambda w, x: conv(x, w, groups=x.shape[-1])), shifts=after(shifted),
        differences={"conv": "its result goes through memory; rule: it is a sum of shifted products"},
    ),
    "maximum pooling": same(
        *PIXELS,
        window=pooled(lambda x: window(x, -jnp.inf, lax.max)), reshape=pooled(lambda x: blocks(x).max((2, 4))),
        twice=pooled(lambda x: blocks(x).max(2).max(3)),
        differences={"window": "its result goes through memory, as windows join no operator; rule: blocks are windows"},
    ),
    "average pooling": same(
        *PIXELS,
        window=pooled(lambda x: window(x, 0.0, lax.add) / 4), reshape=pooled(lambda x: blocks(x).mean((2, 4))),
        slices=pooled(lambda x: sum(corners(x)) / 4),
        differences={"window": "its result goes through memory, as windows join no operator; rule: blocks are windows"},
    ),
    "global pooling": same(
        *({"k": "3 3 A O", "out": "O V"}, "N I I A"),
        mean=lambda w, x: jax.nn.logsumexp(jnp.tanh(conv(x, w["k"])).mean((1, 2)) @ w["out"], -1).mean(),
        means=lambda w, x: jax.nn.logsumexp(jnp.tanh(conv(x, w["k"])).mean(1).mean(1) @ w["out"], -1).mean(),
        sum_by_n=lambda w, x: jax.nn.logsumexp((jnp.tanh(conv(x, w["k"])).sum((1, 2)) / x[0, ..., 0].size) @ w["out"], -1).mean(),
        rows=lambda w, x: jax.nn.logsumexp(
            jnp.tanh(conv(x, w["k"])).reshape(len(x), -1, w["k"].shape[-1]).mean(1) @ w["out"], -1
        ).mean(),
        einsum=lambda w, x: jax.nn.logsumexp(
            jnp.einsum("nhwo->no", jnp.tanh(conv(x, w["k"]))) / x[0, ..., 0].size @ w["out"], -1
        ).mean(),
    ),
    "upsampling": same(
        *PIXELS,
        repeat=pooled(lambda x: jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)),
        broadcast=pooled(
            lambda x: jnp.broadcast_to(
                x[:, :, None, :, None], (len(x), x.shape[1], 2, x.shape[2], 2, x.shape[3])
            ).reshape(len(x), 2 * x.shape[1], 2 * x.shape[2], x.shape[3])
        ),
    ),
    "mixture of all experts": same(
        *MIXTURE,
        einsum=mixed(all_experts),
        gated_results=mixed(lambda w, x, g: jnp.einsum("be,ebd->bd", g, jax.vmap(expert, (0, 0, None))(w["up"], w["down"], x))),
        sum=mixed(lambda w, x, g: (g.T[..., None] * jax.vmap(expert, (0, 0, None))(w["up"], w["down"], x)).sum(0)),
        unrolled=mixed(lambda w, x, g: sum(g[:, k, None] * expert(w["up"][k], w["down"][k], x) for k in range(len(w["up"])))),
        scan=mixed(scanned_experts),
        list=Form(
            mixed(listed_experts),
            lambda w, x: ({"gate": w["gate"], "experts": [(w["up"][k], w["down"][k]) for k in range(len(w["up"]))]}, x),
        ),
        differences={
            **dict.fromkeys(["gated results", "sum"], "E results are weighed; rule: a scale moves through a product"),
            **dict.fromkeys(
                ["scan", "unrolled", "list"], "not divided by experts; rule: equal products are one batched product"
            ),
        },
    ),
    "dispatch to experts": same(
        *MIXTURE,
        einsum=routed(by_einsum), einsum_experts=routed(by_einsum_experts), scatter=routed(by_scatter),
        differences=dict.fromkeys(
            ["einsum", "einsum experts"], "2·B·E·P·D operations with one-hot factors; rule: such a product is a gather or a scatter"
        ),
    ),
    "sum over segments": same(
        *SEGMENTS,
        segment_sum=gathered(lambda x, i: jax.ops.segment_sum(x, i, 768)),
        at_add=gathered(lambda x, i: jnp.zeros((768, x.shape[1]), x.dtype).at[i].add(x)),
        one_hot=gathered(lambda x, i: jax.nn.one_hot(i, 768, dtype=x.dtype).T @ x),
        differences={"one hot": "a product of 2·B·S·D operations; rule: one-hot, transposed, times rows is a scatter"},
    ),
    "distances": same(
        *("D K", "B D", "S K"),
        expanded=lambda w, x, c: (lambda h: jnp.tanh((h * h).sum(-1)[:, None] - 2 * h @ c.T + (c * c).sum(-1)).mean())(x @ w),
        einsum=lambda w, x, c: (
            lambda h: jnp.tanh(
                jnp.einsum("bk,bk->b", h, h)[:, None] - 2 * jnp.einsum("bk,sk->bs", h, c) + jnp.einsum("sk,sk->s", c, c)
            ).mean()
        )(x @ w),
        difference=lambda w, x, c: jnp.tanh(jnp.square((x @ w)[:, None] - c).sum(-1)).mean(),
        vmap=lambda w, x, c: jax.vmap(lambda h: jnp.tanh(jnp.square(h - c).sum(-1)).mean())(x @ w).mean(),
        differences=dict.fromkeys(
            ["expanded", "einsum"], "a product's result goes through memory; rule: the square of a difference, expanded"
        ),
    ),
}  # fmt: skip
