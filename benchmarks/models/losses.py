"""The losses that the models end in."""

import jax
import jax.numpy as jnp

from .model import Tree


def log_likelihood(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Log probability of each label. Logits [..., classes], labels [...] -> [...]."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return chosen.squeeze(-1)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(log_likelihood(logits, labels))


def squared_error(prediction: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(prediction - target))


def click_loss(logit: jax.Array, clicked: jax.Array) -> jax.Array:
    """Binary cross-entropy of a click. Both [batch]."""
    return jnp.mean(jax.nn.softplus(logit) - clicked * logit)


def cast(params: Tree, dtype: jnp.dtype) -> Tree:
    """Parameters as a lower precision computes with them; the gradient arrives in their own precision."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
