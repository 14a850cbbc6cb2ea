"""Equinox, and Equimo: vision models on it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.packages.package import Abstract, Case, cross_entropy, key, model, tokens


@model("equinox", "encoder")
def equinox_encoder() -> Case:
    """A module with holes where its functions are, mapped over the batch; RMS norms and rotary positions."""
    import equinox as eqx

    class Block(eqx.Module):
        norm1: eqx.nn.RMSNorm
        norm2: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        rotary: eqx.nn.RotaryPositionalEmbedding
        mlp: eqx.nn.MLP
        dropout: eqx.nn.Dropout

        def __init__(self, key: Any) -> None:
            a, b = jax.random.split(key)
            self.norm1, self.norm2 = eqx.nn.RMSNorm(512), eqx.nn.LayerNorm(512)
            self.attention = eqx.nn.MultiheadAttention(8, 512, key=a)
            self.rotary = eqx.nn.RotaryPositionalEmbedding(64)
            self.mlp = eqx.nn.MLP(512, 512, 2048, 1, jax.nn.gelu, key=b)
            self.dropout = eqx.nn.Dropout(0.1)

        def __call__(self, x: jax.Array, key: Any) -> jax.Array:
            y = jax.vmap(self.norm1)(x)

            def turn(q: Any, k: Any, v: Any) -> Any:
                heads = jax.vmap(self.rotary, in_axes=1, out_axes=1)
                return heads(q), heads(k), v

            x = x + self.attention(y, y, y, process_heads=turn)
            return x + self.dropout(jax.vmap(self.mlp)(jax.vmap(self.norm2)(x)), key=key)

    class Encoder(eqx.Module):
        embedding: eqx.nn.Embedding
        blocks: list
        head: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 8)
            self.embedding = eqx.nn.Embedding(32000, 512, key=keys[0])
            self.blocks = [Block(k) for k in keys[1:7]]
            self.head = eqx.nn.Linear(512, 32000, key=keys[7])

        def __call__(self, x: jax.Array, key: Any) -> jax.Array:
            y = jax.vmap(self.embedding)(x)
            for block, k in zip(self.blocks, jax.random.split(key, 6), strict=True):
                y = block(y, k)
            return jax.vmap(self.head)(y)

    params, static = eqx.partition(eqx.filter_eval_shape(Encoder, key()), lambda x: isinstance(x, Abstract))

    def loss(params: Any, x: jax.Array, labels: jax.Array, seed: jax.Array) -> jax.Array:
        network = eqx.combine(params, static)
        logits = jax.vmap(network)(x, jax.random.split(seed, x.shape[0]))
        return cross_entropy(logits, labels)

    return loss, (params, tokens(512), tokens(512), key())


@model("equinox", "ResNet-18 with group and batch norm")
def equinox_resnet() -> Case:
    """Channels first, mapped over the batch by a named axis: batch norm is a `pmean` inside `vmap`."""
    import equinox as eqx

    class Block(eqx.Module):
        conv1: eqx.nn.Conv2d
        conv2: eqx.nn.Conv2d
        norm1: eqx.nn.GroupNorm
        norm2: eqx.nn.BatchNorm
        short: Any

        def __init__(self, before: int, after: int, key: Any) -> None:
            a, b, c = jax.random.split(key, 3)
            self.conv1 = eqx.nn.Conv2d(before, after, 3, 1 + (before != after), 1, key=a)
            self.conv2 = eqx.nn.Conv2d(after, after, 3, 1, 1, key=b)
            self.norm1, self.norm2 = eqx.nn.GroupNorm(8, after), eqx.nn.BatchNorm(after, "batch", mode="batch")
            self.short = eqx.nn.Conv2d(before, after, 1, 2, key=c) if before != after else None

        def __call__(self, x: jax.Array, state: Any) -> Any:
            y = jax.nn.relu(self.norm1(self.conv1(x)))
            y, state = self.norm2(self.conv2(y), state)
            return jax.nn.relu(y + (x if self.short is None else self.short(x))), state

    class ResNet(eqx.Module):
        stem: eqx.nn.Conv2d
        blocks: list
        head: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 10)
            widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
            self.stem = eqx.nn.Conv2d(3, 64, 7, 2, 3, key=keys[0])
            self.blocks = [Block(a, b, k) for a, b, k in zip(widths[:-1], widths[1:], keys[1:9], strict=True)]
            self.head = eqx.nn.Linear(512, 1000, key=keys[9])

        def __call__(self, x: jax.Array, state: Any) -> Any:
            x = eqx.nn.MaxPool2d(3, 2, 1)(self.stem(x))
            for block in self.blocks:
                x, state = block(x, state)
            return self.head(jnp.mean(x, (1, 2))), state

    shapes, state = eqx.filter_eval_shape(eqx.nn.make_with_state(ResNet), key())
    params, static = eqx.partition(shapes, lambda x: isinstance(x, Abstract))

    def loss(params: Any, state: Any, image: jax.Array, label: jax.Array) -> Any:
        network = eqx.combine(params, static)
        logits, new = jax.vmap(network, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(image, state)
        return cross_entropy(logits, label), new

    return loss, (params, state, Abstract((32, 3, 224, 224), jnp.float32), Abstract((32,), jnp.int32))


@model("equimo", "ViT-S/16")
def equimo_vit() -> Case:
    import equimo.models as models  # pyright: ignore[reportMissingImports]
    import equinox as eqx

    def make(k: Any) -> Any:
        return models.VisionTransformer(
            img_size=224, in_channels=3, dim=384, patch_size=16, num_heads=[6], depths=[12], num_classes=1000, key=k
        )

    params, static = eqx.partition(eqx.filter_eval_shape(make, key()), lambda x: isinstance(x, Abstract))

    def loss(params: Any, image: jax.Array, label: jax.Array, seed: jax.Array) -> jax.Array:
        network = eqx.combine(params, static)
        keys = jax.random.split(seed, image.shape[0])
        return cross_entropy(jax.vmap(lambda x, k: network(x, k))(image, keys), label)

    return loss, (params, Abstract((32, 3, 224, 224), jnp.float32), Abstract((32,), jnp.int32), key())
