"""Normalizations, embeddings, products of matrices, and elementwise functions, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.equivalent.forms import Equivalence, Form, same

NORM = ({"w": "D D", "gain": "D", "bias": "D"}, "B D")
EPS = 1e-5


def normed(norm: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.tanh(norm(x @ w["w"], w["gain"], w["bias"])).mean()


def moments(x: Any, gain: Any, bias: Any) -> Any:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + EPS) * gain + bias


def centred(x: Any, gain: Any, bias: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS) * gain + bias


def sums(x: Any, gain: Any, bias: Any) -> Any:
    n = x.shape[-1]
    x = x - (x.sum(-1) / n)[:, None]
    return gain * x / jnp.sqrt((x * x).sum(-1) / n + EPS)[:, None] + bias


def squares(x: Any, gain: Any, bias: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt((x * x).mean(-1, keepdims=True) - mean * mean + EPS) * gain + bias


def each(norm: Callable[..., Any]) -> Callable[..., Any]:
    def one(x: Any, gain: Any, bias: Any) -> Any:
        return (x - x.mean()) * lax.rsqrt(x.var() + EPS) * gain + bias

    return lambda x, gain, bias: jax.vmap(norm or one, (0, None, None))(x, gain, bias)


def one_row(x: Any, gain: Any, bias: Any) -> Any:
    return (x - x.mean()) * lax.rsqrt(x.var() + EPS) * gain + bias


IMAGES = {"k": "3 3 A O", "gain": "O", "bias": "O"}


def convolved(w: Any, x: Any) -> Any:
    return lax.conv_general_dilated(x, w["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def batch(norm: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.tanh(norm(convolved(w, x), w["gain"], w["bias"])).mean()


def over_axes(x: Any, gain: Any, bias: Any) -> Any:
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * lax.rsqrt(var + EPS) * gain + bias


def over_rows(x: Any, gain: Any, bias: Any) -> Any:
    flat = x.reshape(-1, x.shape[-1])
    return ((flat - flat.mean(0)) / jnp.sqrt(flat.var(0) + EPS) * gain + bias).reshape(x.shape)


def over_channels(x: Any, gain: Any, bias: Any) -> Any:
    return jax.vmap(one_row, (-1, 0, 0), -1)(x, gain, bias)


def scaled_sums(x: Any, gain: Any, bias: Any) -> Any:
    n = x.size // x.shape[-1]
    x = x - x.sum((0, 1, 2), keepdims=True) / n
    return x * (gain * lax.rsqrt((x * x).sum((0, 1, 2)) / n + EPS)) + bias


def groups(x: Any, gain: Any, bias: Any) -> Any:
    parts = x.reshape(*x.shape[:3], 2, -1)
    mean, var = parts.mean((1, 2, 4), keepdims=True), parts.var((1, 2, 4), keepdims=True)
    return ((parts - mean) * lax.rsqrt(var + EPS)).reshape(x.shape) * gain + bias


def groups_by_vmap(x: Any, gain: Any, bias: Any) -> Any:
    parts = x.reshape(*x.shape[:3], 2, -1)
    one = jax.vmap(jax.vmap(lambda x: (x - x.mean()) * lax.rsqrt(x.var() + EPS), 2, 2))
    return one(parts).reshape(x.shape) * gain + bias


def groups_merged(x: Any, gain: Any, bias: Any) -> Any:
    parts = x.reshape(x.shape[0], x.shape[1] * x.shape[2], 2, -1)
    parts = parts - parts.mean((1, 3), keepdims=True)
    return (parts / jnp.sqrt(jnp.square(parts).mean((1, 3), keepdims=True) + EPS)).reshape(x.shape) * gain + bias


def rooted(norm: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.tanh(norm(x @ w["w"]) * w["gain"]).mean()


def looked_up(look: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda w, ids, x: jnp.tanh(look(w["table"], ids) @ w["out"] + x).mean()


TABLE = ({"table": "V D", "out": "D D"}, "B < V", "B D")
BAG = ({"table": "V D", "out": "D D"}, "B W < V", "B D")


def scanned_bag(table: Any, ids: Any) -> Any:
    start = jnp.zeros((len(ids), table.shape[1]), table.dtype)
    return lax.scan(lambda total, i: (total + table[i], None), start, ids.T)[0]


def segments(table: Any, ids: Any) -> Any:
    owner = jnp.repeat(jnp.arange(len(ids)), ids.shape[1])
    return jax.ops.segment_sum(table[ids.reshape(-1)], owner, len(ids))


def two_layers(up: Callable[[Any, Any], Any], down: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.square(down(jax.nn.relu(up(x, w["up"]) + w["bias"]), w["down"])).mean()


MLP = ({"up": "D F", "bias": "F", "down": "F D"}, "B D")
WIDE = {"up": "D F", "down": "F D"}
GATED = ("D 2 F", "B D")


def activated(fn: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.square(fn(x @ w["up"]) @ w["down"]).mean()


def tanh_gelu(x: Any) -> Any:
    return 0.5 * x * (1 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


def cast(x: Any) -> Any:
    return x.astype(jnp.bfloat16)


CLASSES: dict[str, Equivalence] = {
    "layer norm": same(
        *NORM,
        moments=normed(moments), centred=normed(centred), sums=normed(sums), vmap=normed(jax.vmap(one_row, (0, None, None))),
        standardize=normed(lambda x, gain, bias: jax.nn.standardize(x, epsilon=EPS) * gain + bias),
        squares=normed(squares),
    ),
    "RMS norm": same(
        *({"w": "D D", "gain": "D"}, "B D"),
        rsqrt=rooted(lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS)),
        sqrt=rooted(lambda x: x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + EPS)),
        vmap=rooted(jax.vmap(lambda x: x * lax.rsqrt(jnp.mean(x * x) + EPS))),
        dot=rooted(lambda x: x * lax.rsqrt(jnp.einsum("bd,bd->b", x, x) / x.shape[-1] + EPS)[:, None]),
        sum_by_n=rooted(lambda x: x * (jnp.sum(x**2, -1, keepdims=True) / x.shape[-1] + EPS) ** -0.5),
    ),
    "batch norm": same(
        *(IMAGES, "N I I A"),
        axes=batch(over_axes), rows=batch(over_rows), vmap=batch(over_channels), sums=batch(scaled_sums),
    ),
    "group norm": same(
        *(IMAGES, "N I I A"), axes=batch(groups), vmap=batch(groups_by_vmap), merged=batch(groups_merged),
    ),
    "unit vectors": same(
        *({"w": "D D", "gain": "D"}, "B D"),
        norm=rooted(lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)),
        rsqrt=rooted(lambda x: x * lax.rsqrt((x * x).sum(-1, keepdims=True))),
        vmap=rooted(jax.vmap(lambda x: x / jnp.sqrt(jnp.vdot(x, x)))),
    ),
    "weight normalization": same(
        *({"w": "D F", "gain": "F"}, "B D"),
        weight=lambda w, x: jnp.square(x @ (w["w"] * (w["gain"] * lax.rsqrt((w["w"] ** 2).sum(0))))).mean(),
        norm=lambda w, x: jnp.square(x @ (w["gain"] * w["w"] / jnp.linalg.norm(w["w"], axis=0))).mean(),
        vmap=lambda w, x: jnp.square(
            x @ jax.vmap(lambda c, g: g * c / jnp.sqrt(jnp.sum(c * c)), (1, 0), 1)(w["w"], w["gain"])
        ).mean(),
        result=lambda w, x: jnp.square(x @ w["w"] * (w["gain"] / jnp.linalg.norm(w["w"], axis=0))).mean(),
    ),
    "embedding": same(
        *TABLE,
        index=looked_up(lambda t, i: t[i]), take=looked_up(lambda t, i: jnp.take(t, i, axis=0)),
        vmap=looked_up(lambda t, i: jax.vmap(lambda i: t[i])(i)),
        one_hot=looked_up(lambda t, i: jax.nn.one_hot(i, len(t), dtype=t.dtype) @ t),
        differences={"one hot": "2·B·V·D operations in place of reading B rows; rule: one-hot times table is a gather"},
    ),
    "embedding bag": same(
        *BAG,
        sum=looked_up(lambda t, i: t[i].sum(1)), vmap=looked_up(lambda t, i: jax.vmap(lambda i: t[i].sum(0))(i)),
        flat=looked_up(lambda t, i: t[i.reshape(-1)].reshape(*i.shape, -1).sum(1)),
        scan=looked_up(scanned_bag), segment_sum=looked_up(segments),
        differences={
            "scan": "the sum is read and written in every step",
            "segment sum": "a scatter whose indices are computed; rule: a scatter of equal runs is a sum of a reshape",
        },
    ),
    "tables": same(
        *("W V D", "B W < V"),
        vmap=lambda w, i: jnp.tanh(jax.vmap(lambda t, i: t[i], (0, 1), 1)(w, i)).mean(),
        index=lambda w, i: jnp.tanh(w[jnp.arange(w.shape[0])[None], i]).mean(),
        list=Form(
            lambda w, i: jnp.tanh(jnp.stack([t[i[:, k]] for k, t in enumerate(w)], 1)).mean(),
            lambda w, i: ([w[k] for k in range(w.shape[0])], i),
        ),
        differences={"list": "W operators are launched; rule: lookups in separate tables are one in stacked tables"},
    ),
    "positions": same(
        *({"table": "V D", "at": "S D"}, "N S < V"),
        added=lambda w, i: jnp.tanh(w["table"][i] + w["at"]).mean(),
        broadcast=lambda w, i: jnp.tanh(w["table"][i] + jnp.broadcast_to(w["at"][None], (*i.shape, w["at"].shape[1]))).mean(),
        index=lambda w, i: jnp.tanh(w["table"][i] + w["at"][jnp.arange(i.shape[1])][None]).mean(),
        vmap=lambda w, i: jnp.tanh(jax.vmap(lambda i: w["table"][i] + w["at"])(i)).mean(),
        slice=lambda w, i: jnp.tanh(w["table"][i] + lax.dynamic_slice_in_dim(w["at"], 0, i.shape[1], 0)).mean(),
    ),
    "tied embedding": same(
        *("V D", "B < V", "B D"),
        transpose=lambda w, i, x: jax.nn.logsumexp((w[i] + x) @ w.T, -1).mean(),
        einsum=lambda w, i, x: jax.nn.logsumexp(jnp.einsum("bd,vd->bv", w[i] + x, w), -1).mean(),
        vmap=lambda w, i, x: jax.vmap(lambda i, x: jax.nn.logsumexp(w @ (w[i] + x)))(i, x).mean(),
    ),
    "dot interaction": same(
        *("D C", "B W D"),
        einsum=lambda w, x: jnp.tanh(jnp.einsum("bfc,bgc->bfg", x @ w, x @ w)).mean(),
        matmul=lambda w, x: jnp.tanh((x @ w) @ jnp.swapaxes(x @ w, 1, 2)).mean(),
        vmap=lambda w, x: jnp.tanh(jax.vmap(lambda e: e @ e.T)(x @ w)).mean(),
    ),
    "dense layer": same(
        *({"w": "D F", "bias": "F"}, "B D"),
        matmul=lambda w, x: jnp.tanh(x @ w["w"] + w["bias"]).mean(),
        einsum=lambda w, x: jnp.tanh(jnp.einsum("bd,df->bf", x, w["w"]) + w["bias"][None, :]).mean(),
        vmap=lambda w, x: jax.vmap(lambda x: jnp.tanh(x @ w["w"] + w["bias"]).mean())(x).mean(),
        tensordot=lambda w, x: jnp.tanh(jnp.tensordot(x, w["w"], 1) + w["bias"]).mean(),
        transposed=lambda w, x: jnp.tanh((w["w"].T @ x.T + w["bias"][:, None]).T).mean(),
        stored_transposed=Form(
            lambda w, x: jnp.tanh(x @ w["w"].T + w["bias"]).mean(), lambda w, x: ({**w, "w": w["w"].T}, x)
        ),
    ),
    "two layers": same(
        *MLP,
        matmul=two_layers(jnp.matmul, jnp.matmul),
        einsum=two_layers(lambda x, w: jnp.einsum("bd,df->bf", x, w), lambda x, w: jnp.einsum("bf,fd->bd", x, w)),
        vmap=lambda w, x: jax.vmap(lambda x: jnp.square(jax.nn.relu(x @ w["up"] + w["bias"]) @ w["down"]).mean())(x).mean(),
        tuple=Form(
            lambda w, x: jnp.square(jax.nn.relu(x @ w[0] + w[1]) @ w[2]).mean(), lambda w, x: ((w["up"], w["bias"], w["down"]), x)
        ),
        columns_of_ones=Form(
            lambda w, x: jnp.square(jax.nn.relu(jnp.concatenate([x, jnp.ones_like(x[:, :1])], 1) @ w["up"]) @ w["down"]).mean(),
            lambda w, x: ({"up": jnp.concatenate([w["up"], w["bias"][None]]), "down": w["down"]}, x),
        ),
        differences={"columns of ones": "the joined width, D + 1, is odd; rule: a product of concatenations is a sum of products"},
    ),
    "gated layer": same(
        *GATED,
        split=lambda w, x: (
            lambda h: jnp.square(jax.nn.silu(h[:, : h.shape[1] // 2]) * h[:, h.shape[1] // 2 :]).mean()
        )(x @ w.reshape(w.shape[0], -1)),
        einsum=lambda w, x: (lambda h: jnp.square(jax.nn.silu(h[:, 0]) * h[:, 1]).mean())(jnp.einsum("bd,dtf->btf", x, w)),
        sliced=lambda w, x: jnp.square(jax.nn.silu(x @ w[:, 0]) * (x @ w[:, 1])).mean(),
        moved=lambda w, x: (lambda a, b: jnp.square(jax.nn.silu(a) * b).mean())(*jnp.moveaxis(jnp.tensordot(x, w, 1), 1, 0)),
        dynamic=lambda w, x: (
            lambda h, n: jnp.square(jax.nn.silu(lax.dynamic_slice_in_dim(h, 0, n, 1)) * h[:, n:]).mean()
        )(x @ w.reshape(w.shape[0], -1), w.shape[2]),
        separate=Form(
            lambda w, x: jnp.square(jax.nn.silu(x @ w["gate"]) * (x @ w["up"])).mean(),
            lambda w, x: ({"gate": w[:, 0], "up": w[:, 1]}, x),
        ),
        differences={
            "separate": "two products, and gradients sent, for one; rule: products of one operand are one product",
            "sliced": "parts of the weight are cut out and sent one by one; rule: a part of a product is a product of a part",
        },
    ),
    "gated layer, interleaved": same(
        *("D F 2", "B D"),
        einsum=lambda w, x: (lambda h: jnp.square(jax.nn.silu(h[..., 0]) * h[..., 1]).mean())(jnp.einsum("bd,dft->bft", x, w)),
        strided=lambda w, x: (
            lambda h: jnp.square(jax.nn.silu(h[:, ::2]) * h[:, 1::2]).mean()
        )(x @ w.reshape(w.shape[0], -1)),
    ),
    "maxout": same(
        *("D F 2", "B D"),
        reshape=lambda w, x: jnp.square((x @ w.reshape(len(w), -1)).reshape(len(x), -1, 2).max(-1)).mean(),
        einsum=lambda w, x: jnp.square(jnp.einsum("bd,dfk->bfk", x, w).max(-1)).mean(),
        vmap=lambda w, x: jnp.square(jax.vmap(lambda v: x @ v, -1)(w).max(0)).mean(),
        strided=lambda w, x: (
            lambda h: jnp.square(jnp.maximum(h[:, ::2], h[:, 1::2])).mean()
        )(x @ w.reshape(len(w), -1)),
    ),
    "token mixing": same(
        *({"tokens": "S S", "channels": "D D"}, "N S D"),
        swapped=lambda w, x: jnp.square((x.swapaxes(1, 2) @ w["tokens"]).swapaxes(1, 2) @ w["channels"]).mean(),
        einsum=lambda w, x: jnp.square(jnp.einsum("nsd,st->ntd", x, w["tokens"]) @ w["channels"]).mean(),
        left=lambda w, x: jnp.square((w["tokens"].T @ x) @ w["channels"]).mean(),
        vmap=lambda w, x: jnp.square(jax.vmap(lambda c: c @ w["tokens"], 2, 2)(x) @ w["channels"]).mean(),
        differences=dict.fromkeys(
            ["einsum", "left"], "a product's result is transposed; rule: a transpose moves through elementwise work"
        ),
    ),
    "joined features": same(
        *({"a": "D F", "b": "D F"}, "B D", "B D"),
        sum=lambda w, x, y: jnp.tanh(x @ w["a"] + y @ w["b"]).mean(),
        concatenated=lambda w, x, y: jnp.tanh(jnp.concatenate([x, y], 1) @ jnp.concatenate([w["a"], w["b"]])).mean(),
        stacked=lambda w, x, y: jnp.tanh(jnp.einsum("kbd,kdf->bf", jnp.stack([x, y]), jnp.stack([w["a"], w["b"]]))).mean(),
        one_weight=Form(
            lambda w, x, y: jnp.tanh(jnp.concatenate([x, y], 1) @ w).mean(),
            lambda w, x, y: (jnp.concatenate([w["a"], w["b"]]), x, y),
        ),
        differences=dict.fromkeys(
            ["concatenated", "stacked", "one weight"],
            "operands are joined in memory; rule: a product of concatenations is a sum of products",
        ),
    ),
    "bilinear form": same(
        *("D D", "B D", "B D"),
        einsum=lambda w, x, y: jnp.tanh(jnp.einsum("bi,ij,bj->b", x, w, y)).mean(),
        product=lambda w, x, y: jnp.tanh(((x @ w) * y).sum(-1)).mean(),
        vmap=lambda w, x, y: jax.vmap(lambda x, y: jnp.tanh(x @ w @ y))(x, y).mean(),
    ),
    "low rank": same(
        *({"a": "D K", "b": "K F"}, "B D", "D F"),
        products=lambda w, x, f: jnp.tanh(x @ f + (x @ w["a"]) @ w["b"]).mean(),
        einsum=lambda w, x, f: jnp.tanh(x @ f + jnp.einsum("bd,dk,kf->bf", x, w["a"], w["b"])).mean(),
        vmap=lambda w, x, f: jax.vmap(lambda x: jnp.tanh(x @ f + x @ w["a"] @ w["b"]).mean())(x).mean(),
        merged=lambda w, x, f: jnp.tanh(x @ (f + w["a"] @ w["b"])).mean(),
        differences={"merged": "the frozen weight's cotangent is computed, D·F; rule: products distribute over sums"},
    ),
    "gelu": same(
        *(WIDE, "B D"),
        jax_nn=activated(jax.nn.gelu), by_hand=activated(tanh_gelu), vmap=activated(jax.vmap(jax.nn.gelu)),
    ),
    "silu": same(
        *(WIDE, "B D"),
        jax_nn=activated(jax.nn.silu), sigmoid=activated(lambda x: x * jax.nn.sigmoid(x)),
        by_hand=activated(lambda x: x / (1 + jnp.exp(-x))),
    ),
    "relu": same(
        *(WIDE, "B D"),
        jax_nn=activated(jax.nn.relu), maximum=activated(lambda x: jnp.maximum(x, 0)),
        where=activated(lambda x: jnp.where(x > 0, x, 0)), product=activated(lambda x: x * (x > 0)),
    ),
    "dropout": same(
        *(WIDE, "B D", "key"),
        where=lambda w, x, key: (
            lambda h: jnp.square(jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0.0) @ w["down"]).mean()
        )(jnp.tanh(x @ w["up"])),
        product=lambda w, x, key: (
            lambda h: jnp.square((h * jax.random.bernoulli(key, 0.9, h.shape) / 0.9) @ w["down"]).mean()
        )(jnp.tanh(x @ w["up"])),
    ),
    "casts of weights": same(
        *(WIDE, "bf16 B D"),
        at_use=lambda w, x: jnp.square((jnp.tanh(x @ cast(w["up"])) @ cast(w["down"])).astype(jnp.float32)).mean(),
        before=lambda w, x: (
            lambda w: jnp.square((jnp.tanh(x @ w["up"]) @ w["down"]).astype(jnp.float32)).mean()
        )(jax.tree.map(cast, w)),
        vmap=lambda w, x: jax.vmap(
            lambda x: jnp.square((jnp.tanh(x @ cast(w["up"])) @ cast(w["down"])).astype(jnp.float32)).mean()
        )(x).mean(),
    ),
    "casts of rows": same(
        *("V D", "B < V", "bf16 D D"),
        after=lambda w, i, v: jnp.tanh(cast(w[i]) @ v).astype(jnp.float32).mean(),
        before=lambda w, i, v: jnp.tanh(cast(w)[i] @ v).astype(jnp.float32).mean(),
        differences={"after": "B rows are cast in place of V; rule: a cast after a gather is one before it"},
    ),
    "mean of a cast": same(
        *("D F", "bf16 B D"),
        dtype=lambda w, x: (lambda h: h.mean(dtype=jnp.float32))(jnp.tanh(x @ cast(w))),
        cast=lambda w, x: jnp.tanh(x @ cast(w)).astype(jnp.float32).mean(),
        sum_by_n=lambda w, x: (lambda h: h.astype(jnp.float32).sum() / h.size)(jnp.tanh(x @ cast(w))),
    ),
}  # fmt: skip
