"""Flax, Linen and NNX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.packages.package import Case, abstract, cross_entropy, images, key, model, tokens


@model("flax", "linen ViT-B/16")
def linen_vit() -> Case:
    """Typed random keys, dropout, attention by Flax's own layer."""
    import flax.linen as nn

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(12, dropout_rate=0.1, deterministic=False)(y, y)
            y = nn.Dense(3072)(nn.LayerNorm()(x))
            y = nn.Dropout(0.1, deterministic=False)(nn.gelu(y))
            return x + nn.Dense(768)(y)

    class ViT(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(768, (16, 16), (16, 16), name="embedding")(x).reshape(x.shape[0], -1, 768)
            cls = self.param("cls", nn.initializers.zeros, (1, 1, 768))
            x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)), x], axis=1)
            x = x + self.param("position", nn.initializers.normal(0.02), (1, x.shape[1], 768))
            for k in range(12):
                x = Encoder(name=f"layer_{k}")(x)
            return nn.Dense(1000, name="head")(nn.LayerNorm()(x)[:, 0])

    network = ViT()
    image, label = images(224)
    params = jax.eval_shape(network.init, {"params": key(), "dropout": key()}, image)["params"]

    def loss(params: Any, image: jax.Array, label: jax.Array, seed: jax.Array) -> jax.Array:
        logits: Any = network.apply({"params": params}, image, rngs={"dropout": seed})
        return cross_entropy(logits, label)

    return loss, (params, image, label, key())


@model("flax", "linen ResNet-50")
def linen_resnet() -> Case:
    """Batch statistics as a mutable collection, which come out as auxiliary outputs; bfloat16 compute."""
    import flax.linen as nn

    class Block(nn.Module):
        width: int
        stride: int

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            def norm(y: jax.Array) -> jax.Array:
                return nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)(y)

            def conv(y: jax.Array, width: int, window: int, stride: int = 1) -> jax.Array:
                return nn.Conv(width, (window, window), (stride, stride), use_bias=False, dtype=jnp.bfloat16)(y)

            y = nn.relu(norm(conv(x, self.width, 1)))
            y = nn.relu(norm(conv(y, self.width, 3, self.stride)))
            y = norm(conv(y, 4 * self.width, 1))
            if x.shape != y.shape:
                x = norm(conv(x, 4 * self.width, 1, self.stride))
            return nn.relu(x + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=jnp.bfloat16)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)(x))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for stage, blocks in enumerate((3, 4, 6, 3)):
                for k in range(blocks):
                    x = Block(64 * 2**stage, 2 if stage and not k else 1)(x)
            return nn.Dense(1000)(jnp.mean(x, (1, 2)))

    network = ResNet()
    image, label = images(224)
    made = jax.eval_shape(network.init, key(), image)

    def loss(params: Any, stats: Any, image: jax.Array, label: jax.Array) -> Any:
        logits, new = network.apply({"params": params, "batch_stats": stats}, image, mutable=["batch_stats"])
        return cross_entropy(logits, label), new

    return loss, (made["params"], made["batch_stats"], image, label)


@model("flax", "nnx GPT-2")
def nnx_gpt() -> Case:
    """State as an NNX pytree, split and merged at the boundary."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm1, self.norm2 = nnx.LayerNorm(768, rngs=rngs), nnx.LayerNorm(768, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(12, 768, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(768, 3072, rngs=rngs), nnx.Linear(3072, 768, rngs=rngs)

        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            x = x + self.attention(self.norm1(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class GPT(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.token, self.position = nnx.Embed(50257, 768, rngs=rngs), nnx.Embed(1024, 768, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(12)])
            self.norm = nnx.LayerNorm(768, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            mask = nnx.make_causal_mask(x)
            y = self.token(x) + self.position(jnp.arange(x.shape[1]))
            for block in self.blocks:
                y = block(y, mask)
            return self.token.attend(self.norm(y))

    graph, state = nnx.split(nnx.eval_shape(lambda: GPT(nnx.Rngs(0))))

    def loss(state: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(graph, state)(x), labels)

    return loss, (abstract(state), tokens(1024), tokens(1024))
