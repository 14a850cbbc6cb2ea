"""Networks of images."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.zoo.entry import Case, Pick, cross_entropy, entry, integers, key, normal


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
