"""Small models with a `jax.checkpoint`: with policies, in loops, and nested."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from rerun_models import enter
from small_models import Small, f, i

POLICIES: dict[str, Any] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("up", "out"),
    "products": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "host": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["up"], names_which_can_be_offloaded=[], offload_src="device", offload_dst="pinned_host"
    ),
    "offloaded names": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["out"], names_which_can_be_offloaded=["up"], offload_src="device", offload_dst="pinned_host"
    ),
    "offloaded products": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


def chunked(chunks: int = 2, n: int = 16, d: int = 8, vocabulary: int = 16) -> Small:
    """Cross-entropy of one chunk of the samples after the other, so that only the logits of one chunk are live."""

    def loss(w: Any, batch: Any) -> Any:
        @jax.checkpoint
        def chunk(total: Any, part: Any) -> Any:
            scores = jax.nn.log_softmax(part["x"] @ w)
            return total - jnp.take_along_axis(scores, part["y"][:, None], 1).sum(), None

        parts = jax.tree.map(lambda t: t.reshape(chunks, -1, *t.shape[1:]), batch)
        return lax.scan(chunk, jnp.zeros((), w.dtype), parts)[0] / n

    return Small(loss, f(d, vocabulary), {"x": f(n, d), "y": i(n)})


def mlp(p: Any, x: Any) -> Any:
    """A layer that reads its normed operand twice, with names for policies."""
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    up = checkpoint_name(y @ p["up"], "up")
    return x + checkpoint_name((jnp.tanh(up) * jax.nn.silu(y @ p["gate"])) @ p["down"], "out")


def saving(policy: str, layers: int = 2, b: int = 16, d: int = 8, wide: int = 16, scanned: bool = True) -> Small:
    """Layers, each a remat with a policy, scanned or written out."""

    def loss(params: Any, x: Any) -> Any:
        one = jax.checkpoint(mlp, policy=POLICIES[policy], prevent_cse=False)
        if scanned:
            return jnp.mean(lax.scan(lambda x, p: (one(p, x), None), x, params)[0] ** 2)
        for k in range(layers):
            x = one(jax.tree.map(lambda t, k=k: t[k], params), x)
        return jnp.mean(x**2)

    shapes = {"up": f(layers, d, wide), "gate": f(layers, d, wide), "down": f(layers, wide, d)}
    return Small(loss, shapes, f(b, d))


def loops(inner: bool, outer: bool, b: int = 16, d: int = 8, wide: int = 16) -> Small:
    """Layers in a loop in a loop, remats of the one, the other, or both."""

    def loss(params: Any, x: Any) -> Any:
        layer = jax.checkpoint(mlp) if inner else mlp

        def group(x: Any, some: Any) -> Any:
            return lax.scan(lambda x, p: (layer(p, x), None), x, some)

        return jnp.mean(lax.scan(jax.checkpoint(group) if outer else group, x, params)[0] ** 2)

    return Small(loss, {"up": f(2, 2, d, wide), "gate": f(2, 2, d, wide), "down": f(2, 2, wide, d)}, f(b, d))


def nested(scanned: bool, policy: str = "nothing", b: int = 16, d: int = 8, wide: int = 16) -> Small:
    """A remat in a remat, whose result is read there."""

    def loss(params: Any, x: Any) -> Any:
        inside = jax.checkpoint(mlp)
        layer = jax.checkpoint(lambda p, x: jnp.sin(inside(p, x)) @ p["mix"], policy=POLICIES[policy])
        if scanned:
            return jnp.mean(lax.scan(lambda x, p: (layer(p, x), None), x, params)[0] ** 2)
        return jnp.mean(layer(jax.tree.map(lambda t: t[0], params), x) ** 2)

    return Small(loss, {"up": f(2, d, wide), "gate": f(2, d, wide), "down": f(2, wide, d), "mix": f(2, d, d)}, f(b, d))


def wrapped(policy: str, b: int = 16, d: int = 8, wide: int = 16) -> Small:
    """Scanned layers, each a remat around a remat with a policy, whose result is read in no backward pass."""

    def loss(params: Any, x: Any) -> Any:
        layer = jax.checkpoint(jax.checkpoint(mlp, policy=POLICIES[policy]))
        return jnp.mean(lax.scan(lambda x, p: (layer(p, x), None), x, params)[0] ** 2)

    return Small(loss, {"up": f(2, d, wide), "gate": f(2, d, wide), "down": f(2, wide, d)}, f(b, d))


MODELS: dict[str, Callable[[], Small]] = {
    "chunked": chunked,
    **{f"saving {policy}": partial(saving, policy) for policy in POLICIES},
    "one layer": partial(saving, "nothing", layers=1),
    "written out": partial(saving, "nothing", scanned=False),
    "written out, names": partial(saving, "names", scanned=False),
    "inner loop": partial(loops, True, False),
    "outer loop": partial(loops, False, True),
    "both loops": partial(loops, True, True),
    "nested": partial(nested, True),
    "nested, written out": partial(nested, False),
    "nested, saving products": partial(nested, True, "products"),
    "nested, offloading products": partial(nested, True, "offloaded products"),
    "wrapped, saving products": partial(wrapped, "products"),
    "wrapped, offloading products": partial(wrapped, "offloaded products"),
}
enter(MODELS)
