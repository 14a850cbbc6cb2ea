"""Networks of images."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.zoo.entry import Case, Pick, cross_entropy, entry, integers, keras_case, key, normal


@entry("flax", "NNX convolutional network with batch norm and dropout (the MNIST guide)")
def nnx_cnn(pick: Pick) -> Case:
    from flax import nnx

    class CNN(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.conv1, self.norm1 = nnx.Conv(1, 32, (3, 3), rngs=rngs), nnx.BatchNorm(32, rngs=rngs)
            self.conv2, self.norm2 = nnx.Conv(32, 64, (3, 3), rngs=rngs), nnx.BatchNorm(64, rngs=rngs)
            self.linear1, self.linear2 = nnx.Linear(3136, 256, rngs=rngs), nnx.Linear(256, 10, rngs=rngs)
            self.dropout = nnx.Dropout(0.025, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.avg_pool(nnx.relu(self.norm1(self.conv1(x))), (2, 2), (2, 2))
            x = nnx.avg_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), (2, 2))
            return self.linear2(nnx.relu(self.dropout(self.linear1(x.reshape(x.shape[0], -1)))))

    graph = nnx.split(nnx.eval_shape(lambda: CNN(nnx.Rngs(0))), nnx.Param, ...)[0]

    def loss(weights: Any, rest: Any, image: jax.Array, label: jax.Array) -> Any:
        network = nnx.merge(graph, weights, rest, copy=True)
        value = cross_entropy(network(image), label)
        return value, nnx.split(network, nnx.Param, ...)[2]

    def arguments() -> tuple[Any, ...]:
        states: Any = nnx.split(CNN(nnx.Rngs(0)), nnx.Param, ...)[1:]
        return *states, normal(pick(4096, 16), 28, 28, 1), integers(10, pick(4096, 16))

    return loss, arguments


@entry("dm-haiku", "ResNet-50")
def haiku_resnet(pick: Pick) -> Case:
    import haiku as hk

    nets = pick(hk.nets.ResNet50, lambda n: hk.nets.ResNet((1, 1, 1, 1), n, channels_per_group=(16, 16, 32, 32)))
    network = hk.transform_with_state(lambda x: nets(pick(1000, 16))(x, is_training=True))
    batch, size, classes = pick(1024, 8), pick(224, 32), pick(1000, 16)

    def loss(weights: Any, state: Any, image: jax.Array, label: jax.Array) -> Any:
        logits, new = network.apply(weights, state, None, image)
        return cross_entropy(logits, label), new

    def arguments() -> tuple[Any, ...]:
        image = normal(batch, size, size, 3)
        return *network.init(jax.random.PRNGKey(0), image), image, integers(classes, batch)

    return loss, arguments


def _equinox(build: Any, inputs: tuple[int, ...], classes: int, batch: int) -> Case:
    """Cross entropy of a module of Equinox that takes an image and a random key."""
    import equinox as eqx

    static = eqx.partition(eqx.filter_eval_shape(build), lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]

    def loss(weights: Any, image: jax.Array, label: jax.Array, seed: jax.Array) -> jax.Array:
        network = eqx.combine(weights, static)
        logits = jax.vmap(network)(image, jax.random.split(seed, image.shape[0]))
        return cross_entropy(logits, label)

    def arguments() -> tuple[Any, ...]:
        return eqx.filter(build(), eqx.is_array), normal(batch, *inputs), integers(classes, batch), key()

    return loss, arguments


@entry("equimo", "ViT-S/16")
def equimo_vit(pick: Pick) -> Case:
    from equimo.vision.models.vit import VisionTransformer

    def build() -> Any:
        sizes = {"img_size": pick(224, 32), "dim": pick(384, 32), "num_heads": [pick(6, 4)], "depths": [pick(12, 2)]}
        return VisionTransformer(**sizes, in_channels=3, patch_size=16, num_classes=pick(1000, 16), key=key())

    return _equinox(build, (3, pick(224, 32), pick(224, 32)), pick(1000, 16), pick(1024, 8))


@entry("equimo", "MLLA-T (Mamba-like linear attention)")
def equimo_mlla(pick: Pick) -> Case:
    from equimo.vision.models.mlla import Mlla

    def build() -> Any:
        sizes = pick(
            {"dims": [64, 128, 256, 512], "depths": [2, 4, 8, 4], "num_heads": [2, 4, 8, 16]},
            {"dims": [16, 32], "depths": [1, 1], "num_heads": [2, 4]},
        )
        return Mlla(img_size=pick(224, 32), in_channels=3, num_classes=pick(1000, 16), **sizes, key=key())

    return _equinox(build, (3, pick(224, 32), pick(224, 32)), pick(1000, 16), pick(512, 8))


@entry("equimo", "ConvNeXt-T")
def equimo_convnext(pick: Pick) -> Case:
    from equimo.vision.models import convnext

    def build() -> Any:
        more = pick({}, {"dims": [8, 16, 16, 16], "depths": [1, 1, 1, 1]})
        return convnext.convnext_tiny(in_channels=3, num_classes=pick(1000, 16), key=key(), **more)

    return _equinox(build, (3, pick(224, 64), pick(224, 64)), pick(1000, 16), pick(512, 8))


@entry("keras", "EfficientNetV2-B0")
def keras_efficientnet(pick: Pick) -> Case:
    import keras

    size, batch, classes = pick(224, 32), pick(512, 8), pick(1000, 16)
    random: Any = None  # no weights from elsewhere
    network: Any = keras.applications.EfficientNetV2B0(
        weights=random, input_shape=(size, size, 3), classes=classes, include_preprocessing=False
    )
    weights, rest = ([v.value for v in vs] for vs in (network.trainable_variables, network.non_trainable_variables))

    def loss(weights: Any, rest: Any, image: jax.Array, label: jax.Array) -> Any:
        logits, state = network.stateless_call(weights, rest, image, training=True)
        losses: Any = keras.losses.sparse_categorical_crossentropy(label, logits)
        return jnp.mean(losses), state

    return loss, lambda: (weights, rest, normal(batch, size, size, 3), integers(classes, batch))


@entry("equimo", "audio spectrogram Transformer, AST-B/16")
def equimo_ast(pick: Pick) -> Case:
    from equimo.audio.models.ast import AudioSpectrogramTransformer

    frames, bands = pick(1024, 32), pick(128, 32)

    def build() -> Any:
        return AudioSpectrogramTransformer(
            bands, frames, pick(768, 32), 16, pick(10, 16), pick(10, 16), pick(12, 4), [pick(12, 2)],
            num_classes=pick(527, 16), key=key(),
        )  # fmt: skip

    return _equinox(build, (frames, bands), pick(527, 16), pick(256, 8))


@entry("keras-hub", "ViT-B/16")
def keras_vit(pick: Pick) -> Case:
    import keras_hub

    size, classes, batch = pick(224, 32), pick(1000, 16), pick(1024, 8)
    backbone = keras_hub.models.ViTBackbone((size, size, 3), (16, 16), *pick((12, 12, 768, 3072), (2, 4, 32, 64)))
    network = keras_hub.models.ViTImageClassifier(backbone, classes, preprocessor=None)
    return keras_case(network, lambda: normal(batch, size, size, 3), lambda: integers(classes, batch))


@entry("dm-haiku", "VQ-VAE (its example)")
def vq_vae(pick: Pick) -> Case:
    import haiku as hk

    batch, size, width, codes = pick(4096, 8), pick(32, 16), pick(128, 8), pick(512, 16)

    def residual(x: jax.Array) -> jax.Array:
        for _ in range(2):
            y = hk.Conv2D(width // 4, 3)(jax.nn.relu(x))
            x = x + hk.Conv2D(width, 1)(jax.nn.relu(y))
        return jax.nn.relu(x)

    def forward(image: jax.Array) -> Any:
        x = jax.nn.relu(hk.Conv2D(width // 2, 4, 2)(image))
        x = residual(hk.Conv2D(width, 3)(jax.nn.relu(hk.Conv2D(width, 4, 2)(x))))
        quantized = hk.nets.VectorQuantizer(width // 2, codes, 0.25)(hk.Conv2D(width // 2, 1)(x), is_training=True)
        x = residual(hk.Conv2D(width, 3)(quantized["quantize"]))
        x = jax.nn.relu(hk.Conv2DTranspose(width // 2, 4, 2)(x))
        return hk.Conv2DTranspose(3, 4, 2)(x), quantized

    network = hk.without_apply_rng(hk.transform(forward))

    def loss(weights: Any, image: jax.Array) -> Any:
        reconstructed, quantized = network.apply(weights, image)
        return jnp.mean((reconstructed - image) ** 2) / 0.06 + quantized["loss"], quantized["perplexity"]

    def arguments() -> tuple[Any, ...]:
        image = normal(batch, size, size, 3)
        return network.init(jax.random.PRNGKey(0), image), image

    return loss, arguments


@entry("equinox", "score-based diffusion with an MLP-mixer (its example)")
def score_matching(pick: Pick) -> Case:
    import equinox as eqx

    size, patch, width, blocks, batch = pick(32, 8), 4, pick(256, 16), pick(8, 2), pick(4096, 8)
    patches = (size // patch) ** 2

    class Block(eqx.Module):
        over_patches: eqx.nn.MLP
        over_channels: eqx.nn.MLP
        norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

        def __init__(self, key: Any) -> None:
            a, b = jax.random.split(key)
            self.over_patches = eqx.nn.MLP(patches, patches, pick(512, 16), 1, key=a)
            self.over_channels = eqx.nn.MLP(width, width, pick(512, 16), 1, key=b)
            self.norms = eqx.nn.LayerNorm((width, patches)), eqx.nn.LayerNorm((patches, width))

        def __call__(self, y: jax.Array) -> jax.Array:
            y = (y + jax.vmap(self.over_patches)(self.norms[0](y))).T
            return (y + jax.vmap(self.over_channels)(self.norms[1](y))).T

    class Mixer(eqx.Module):
        inwards: eqx.nn.Conv2d
        outwards: eqx.nn.ConvTranspose2d
        blocks: list[Block]
        norm: eqx.nn.LayerNorm

        def __init__(self, key: Any) -> None:
            a, b, *keys = jax.random.split(key, 2 + blocks)
            self.inwards = eqx.nn.Conv2d(2, width, patch, stride=patch, key=a)
            self.outwards = eqx.nn.ConvTranspose2d(width, 1, patch, stride=patch, key=b)
            self.blocks, self.norm = [Block(k) for k in keys], eqx.nn.LayerNorm((width, patches))

        def __call__(self, t: jax.Array, y: jax.Array) -> jax.Array:
            y = self.inwards(jnp.concatenate([y, jnp.full((1, size, size), t / 10)]))
            shape, y = y.shape, y.reshape(width, patches)
            for block in self.blocks:
                y = block(y)
            return self.outwards(self.norm(y).reshape(shape))

    static = eqx.partition(eqx.filter_eval_shape(Mixer, key()), lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]

    def loss(weights: Any, image: jax.Array, seed: jax.Array) -> jax.Array:
        def single(image: jax.Array, t: jax.Array, seed: jax.Array) -> jax.Array:
            mean, std = image * jnp.exp(-0.5 * t), jnp.sqrt(jnp.maximum(1 - jnp.exp(-t), 1e-5))
            noise = jax.random.normal(seed, image.shape)
            score = eqx.combine(weights, static)(t, mean + std * noise)
            return (1 - jnp.exp(-t)) * jnp.mean((score + noise / std) ** 2)

        times, seeds = jax.random.split(seed)
        t = jax.random.uniform(times, (batch,), maxval=10 / batch) + 10 / batch * jnp.arange(batch)
        return jnp.mean(jax.vmap(single)(image, t, jax.random.split(seeds, batch)))

    return loss, lambda: (eqx.filter(Mixer(key()), eqx.is_array), normal(batch, 1, size, size), key(1))
