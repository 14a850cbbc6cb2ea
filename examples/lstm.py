"""Trains an LSTM language model, written in plain JAX with `scan`, on eight devices and on one."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _compare import print_losses
from _text import VOCABULARY, batches
from jax import lax

import unity

LAYERS, HIDDEN, SEQUENCE, BATCH, STEPS = 2, 256, 64, 32, 40


def lstm(layer: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    """One layer over time: [time, batch, width] -> [time, batch, hidden]."""
    hidden = layer["recurrent"].shape[0]
    zero = jnp.zeros((inputs.shape[1], hidden))

    def step(state: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        output, cell = state
        i, f, g, o = jnp.split(x + output @ layer["recurrent"], 4, axis=-1)
        cell = jax.nn.sigmoid(f + 1) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        output = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (output, cell), output

    return lax.scan(step, (zero, zero), inputs @ layer["input"] + layer["bias"])[1]


def loss_fn(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    x = params["embedding"][batch["tokens"].T]
    for layer in params["layers"]:
        x = lstm(layer, x)
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["softmax"], batch["labels"].T).mean()


def initial(key: jax.Array) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 2 + 2 * LAYERS))

    def weight(inputs: int, outputs: int) -> jax.Array:
        return jax.random.normal(next(keys), (inputs, outputs)) * inputs**-0.5

    def layer() -> dict[str, jax.Array]:
        recurrent = weight(HIDDEN, 4 * HIDDEN)
        return {"input": weight(HIDDEN, 4 * HIDDEN), "recurrent": recurrent, "bias": jnp.zeros(4 * HIDDEN)}

    layers = [layer() for _ in range(LAYERS)]
    return {"embedding": weight(VOCABULARY, HIDDEN), "layers": layers, "softmax": weight(HIDDEN, VOCABULARY)}


def train(loss_fn: Callable[..., jax.Array], params: Any, data: Iterable[Any], shard: Callable[..., Any]) -> list[float]:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses, state = [], optimizer.init(params)
    for batch in data:
        params, batch = shard(params, batch)
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)  # without GPUs the processor plays the devices
    params = initial(jax.random.key(0))
    data = list(batches(STEPS, BATCH, SEQUENCE))

    plan = unity.optimize(loss_fn, params, data[0])
    plan.explain()

    alone = train(loss_fn, params, data, shard=lambda *arguments: arguments)
    together = train(plan, params, data, shard=plan.shard)
    print_losses(alone, together, jax.device_count())


if __name__ == "__main__":
    main()
