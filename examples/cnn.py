"""Trains the first blocks of EfficientNetV2, from keras.applications, on eight devices and on one.

Batch norm's running averages go in beside the weights and come out beside the loss, so the loss has an auxiliary
output, as in `jax.value_and_grad(..., has_aux=True)`.

Rounding decides what can be compared here. Of all blocks, with images this small, one rounding of the weights moves the
gradient by 4e-5, on one device as well, and a few steps later losses differ by percents. With the same optimizer MobileNetV2,
whose ReLU6 has kinks, drifts a thousand times as far (1.5e-3 in 20 steps). And a bias just before the next batch norm has no
effect, so its gradient is nothing but rounding, which Adam makes as large as any other. So: the first blocks, of a network of
smooth activations, and plain momentum.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from _compare import print_losses

import unity

SIDE, CLASSES, BATCH, STEPS = 32, 10, 32, 20


def network() -> keras.Model:
    # keras says of its arguments only what their defaults are, and the default here is a string
    whole = keras.applications.EfficientNetV2B0(
        input_shape=(SIDE, SIDE, 3),
        weights=None,  # pyright: ignore[reportArgumentType]
        include_top=False,
        include_preprocessing=False,
    )
    features = keras.layers.GlobalAveragePooling2D()(whole.get_layer("block4a_expand_activation").output)
    return keras.Model(whole.input, keras.layers.Dense(CLASSES)(features))


def gratings(rng: np.random.Generator) -> Iterator[dict[str, jax.Array]]:
    """Noisy stripes; the class is their direction."""
    y, x = np.mgrid[:SIDE, :SIDE] * (2 * np.pi / 8)
    for _ in range(STEPS):
        label = rng.integers(CLASSES, size=BATCH)
        angle, phase = np.pi * label / CLASSES, rng.uniform(0, 2 * np.pi, BATCH)
        along = np.multiply.outer(np.cos(angle), x) + np.multiply.outer(np.sin(angle), y)
        stripes = np.sin(along + phase[:, None, None])[..., None]
        image = stripes + 0.3 * rng.standard_normal((BATCH, SIDE, SIDE, 3))
        yield {"image": jnp.asarray(image, jnp.float32), "label": jnp.asarray(label)}


def train(loss_fn: Callable[..., Any], params: Any, averages: Any, data: list[Any], shard: Callable[..., Any]) -> list[float]:
    optimizer = optax.sgd(0.05, momentum=0.9)

    @jax.jit
    def step(params: Any, averages: Any, state: Any, batch: Any) -> tuple[Any, Any, Any, jax.Array]:
        (loss, averages), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params, averages, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), averages, state, loss

    losses, state = [], optimizer.init(params)
    for batch in data:
        params, averages, batch = shard(params, averages, batch)
        params, averages, state, loss = step(params, averages, state, batch)
        losses.append(float(loss))
    return losses


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)  # without GPUs the processor plays the devices
    keras.utils.set_random_seed(0)
    model = network()
    params = [variable.value for variable in model.trainable_variables]
    averages = [variable.value for variable in model.non_trainable_variables]
    data = list(gratings(np.random.default_rng(0)))

    def loss_fn(params: Any, averages: Any, batch: Any) -> tuple[jax.Array, Any]:
        logits, averages = model.stateless_call(params, averages, batch["image"], training=True)[:2]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), averages

    plan = unity.optimize(loss_fn, params, averages, data[0])
    plan.explain()

    alone = train(loss_fn, params, averages, data, shard=lambda *arguments: arguments)
    together = train(plan, params, averages, data, shard=plan.shard)
    print_losses(alone, together, jax.device_count())


if __name__ == "__main__":
    main()
