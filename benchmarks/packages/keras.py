"""Keras applications."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp

from benchmarks.packages.package import Case, abstract, images, model


@model("keras", "ResNet50", "ResNet50", 224)
@model("keras", "EfficientNetV2B0", "EfficientNetV2B0", 224)
@model("keras", "MobileNetV2", "MobileNetV2", 224)
@model("keras", "ConvNeXtTiny", "ConvNeXtTiny", 224)
@model("keras", "VGG16", "VGG16", 224)
@model("keras", "InceptionV3", "InceptionV3", 299)
@model("keras", "DenseNet121", "DenseNet121", 224)
def keras_application(name: str, size: int) -> Case:
    """With the new state as auxiliary output."""
    import keras

    made: list[Any] = []

    def build() -> int:
        made.append(getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), **bare))
        return 0

    # layers of preprocessing keep constants outside of the variables, which would be tracers of an abstract build
    bare = {"include_preprocessing": False} if name.startswith(("EfficientNetV2", "ConvNeXt")) else {}
    if name.startswith("EfficientNetB"):  # has them always
        build()
    else:
        jax.eval_shape(build)
    network = made[0]
    variables = network.trainable_variables, network.non_trainable_variables
    trainable, other = (abstract([v.value for v in vs]) for vs in variables)

    def loss(trainable: Any, other: Any, image: jax.Array, label: jax.Array) -> Any:
        logits, state = network.stateless_call(trainable, other, image, training=True)
        losses: Any = keras.losses.sparse_categorical_crossentropy(label, logits)
        return jnp.mean(losses), state

    return loss, (trainable, other, *images(size))
