"""A model with all that may be around a pipeline, and how near the memory of a step with one is predicted."""

import jax
import jax.numpy as jnp
from jax import lax

LAYERS, WIDTH, WORDS = 4, 8, 12

# What is predicted is what the compiler of JAX 0.10 makes of a step. Later ones hold up to 17 % less of one with a pipeline.
NEAR = 0.1 if jax.__version_info__ < (0, 11) else 0.2


def language(params, tokens, target, mask):
    """Tied weights, layers that are computed again, samples and sequence merged, a masked mean, a metric, a penalty."""

    @jax.checkpoint
    def layer(c, w):
        return c + jnp.where(mask[..., None], jnp.tanh(c @ w), 0.0), None

    x = lax.scan(layer, params["words"][tokens], params["layers"])[0]
    logits = x.reshape(-1, WIDTH) @ params["words"].T
    each = -jnp.take_along_axis(jax.nn.log_softmax(logits), target.reshape(-1, 1), -1)[:, 0]
    seen = mask.reshape(-1)
    penalty = 1e-2 * (params["layers"] ** 2).sum()
    right = (logits.argmax(-1) == target.reshape(-1)).sum()
    return (each * seen).sum() / seen.sum() + penalty, right
