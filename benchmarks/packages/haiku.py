"""Haiku."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.packages.package import Abstract, Case, cross_entropy, images, model, tokens


@model("haiku", "hk.nets.ResNet50", "ResNet50")
@model("haiku", "hk.nets.MobileNetV1", "MobileNetV1")
def haiku_net(name: str) -> Case:
    """State in and out; a raw random key."""
    import haiku as hk

    network = hk.transform_with_state(lambda x: getattr(hk.nets, name)(num_classes=1000)(x, is_training=True))
    image, label = images(224)
    raw = Abstract((2,), jnp.uint32)
    params, state = jax.eval_shape(network.init, raw, image)

    def loss(params: Any, state: Any, seed: jax.Array, image: jax.Array, label: jax.Array) -> Any:
        logits, new = network.apply(params, state, seed, image)
        return cross_entropy(logits, label), new

    return loss, (params, state, raw, image, label)


@model("haiku", "transformer")
def haiku_transformer() -> Case:
    """Dropout by a raw random key that is split at every use."""
    import haiku as hk

    def forward(x: jax.Array) -> jax.Array:
        y = hk.Embed(32000, 512)(x) + hk.get_parameter("position", (x.shape[1], 512), init=jnp.zeros)
        mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1])))
        for _ in range(6):
            z = hk.LayerNorm(-1, True, True)(y)
            z = hk.MultiHeadAttention(8, 64, w_init_scale=1.0)(z, z, z, mask)
            y += hk.dropout(hk.next_rng_key(), 0.1, z)
            z = hk.nets.MLP([2048, 512], activation=jax.nn.gelu)(hk.LayerNorm(-1, True, True)(y))
            y += hk.dropout(hk.next_rng_key(), 0.1, z)
        return hk.Linear(32000)(hk.LayerNorm(-1, True, True)(y))

    network = hk.transform(forward)
    raw = Abstract((2,), jnp.uint32)
    params = jax.eval_shape(network.init, raw, tokens(512))

    def loss(params: Any, seed: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(network.apply(params, seed, x), labels)

    return loss, (params, raw, tokens(512), tokens(512))
