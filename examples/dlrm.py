"""Trains a recommendation model, whose tables have sizes that nothing divides, on eight devices and on one."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _compare import print_losses

import unity

TABLES = (20011, 4999, 1237, 499, 53, 7, 3)
"""Rows of each embedding table. Nearly all parameters are here."""

WIDTH, DENSE, BATCH, STEPS = 16, 13, 256, 40
BOTTOM, TOP = (DENSE, 64, 32, WIDTH), (WIDTH + (len(TABLES) + 1) * len(TABLES) // 2, 128, 64, 1)


def perceptron(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x @ layers[-1]["weight"] + layers[-1]["bias"]


def loss_fn(params: dict[str, Any], batch: dict[str, Any]) -> jax.Array:
    """Log loss of the clicks, from the products of every two features."""
    dense = perceptron(params["bottom"], batch["dense"])
    found = [table[row] for table, row in zip(params["tables"], batch["rows"], strict=True)]
    features = jnp.stack([dense, *found], axis=1)
    products = jnp.einsum("bid,bjd->bij", features, features)
    row, column = np.tril_indices(features.shape[1], -1)
    joined = jnp.concatenate([dense, products[:, row, column]], axis=1)
    logit = perceptron(params["top"], joined)[:, 0]
    return optax.sigmoid_binary_cross_entropy(logit, batch["clicked"]).mean()


def initial(rng: np.random.Generator) -> dict[str, Any]:
    def layers(widths: tuple[int, ...]) -> list[dict[str, jax.Array]]:
        pairs = pairwise(widths)
        return [{"weight": normal(rng, *pair) * pair[0] ** -0.5, "bias": jnp.zeros(pair[1])} for pair in pairs]

    tables = [normal(rng, rows, WIDTH) * WIDTH**-0.5 for rows in TABLES]
    return {"bottom": layers(BOTTOM), "tables": tables, "top": layers(TOP)}


def clicks(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Users click by a hidden taste for the dense inputs and for single rows; popular rows come often."""
    taste = rng.standard_normal(DENSE)
    appeal = [rng.standard_normal(rows) for rows in TABLES]
    for _ in range(STEPS):
        dense = rng.standard_normal((BATCH, DENSE))
        chosen = [(rows * rng.random(BATCH) ** 3).astype(np.int32) for rows in TABLES]
        liking = dense @ taste + sum(liked[row] for liked, row in zip(appeal, chosen, strict=True))
        clicked = rng.random(BATCH) < 1 / (1 + np.exp(-liking))
        rows = [jnp.asarray(row) for row in chosen]
        yield {"dense": jnp.asarray(dense, jnp.float32), "rows": rows, "clicked": jnp.asarray(clicked, jnp.float32)}


def normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def train(loss_fn: Callable[..., jax.Array], params: Any, data: Iterable[Any], shard: Callable[..., Any]) -> list[float]:
    optimizer = optax.adam(5e-3)

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
    rng = np.random.default_rng(0)
    params, data = initial(rng), list(clicks(rng))

    plan = unity.optimize(loss_fn, params, data[0])
    plan.explain()

    alone = train(loss_fn, params, data, shard=lambda *arguments: arguments)
    together = train(plan, params, data, shard=plan.shard)
    print_losses(alone, together, jax.device_count())


if __name__ == "__main__":
    main()
