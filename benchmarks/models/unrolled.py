"""FlexFlow's LSTM networks step by step (section 8.1: 40 unrolling steps), so that every step's layers are operators of their own.

The same networks as in `recurrent`, which scans: `tests/search/simulator/test_simulator_models.py` compares their losses.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .losses import cross_entropy
from .model import Model, Tree
from .recurrent import nmt, rnnlm, rnntc
from .transformer import dense

State = tuple[jax.Array, jax.Array]
"""An LSTM's output and cell, both [batch, hidden]."""


def rnnlm_unrolled(**sizes: Any) -> Model:
    """Language model: the next word at each step. Sizes as in `recurrent.rnnlm`."""
    scanned = rnnlm(**sizes)

    def loss(params: Tree, data: Tree) -> jax.Array:
        outputs, _ = _encode(params, data["tokens"])
        return _mean_loss([dense(params["softmax"], y) for y in outputs], data["labels"])

    return Model("rnnlm_unrolled", loss, scanned.params, scanned.batch, scanned.below)


def rnntc_unrolled(**sizes: int) -> Model:
    """Text classification: one label, from the last step. Sizes as in `recurrent.rnntc`."""
    scanned = rnntc(**sizes)

    def loss(params: Tree, data: Tree) -> jax.Array:
        outputs, _ = _encode(params, data["tokens"])
        return _mean_loss([dense(params["softmax"], outputs[-1])], data["label"][:, None])

    return Model("rnntc_unrolled", loss, scanned.params, scanned.batch, scanned.below)


def nmt_unrolled(**sizes: int) -> Model:
    """Translation with attention at each of the decoder's steps. Sizes as in `recurrent.nmt`."""
    scanned = nmt(**sizes)

    def loss(params: Tree, data: Tree) -> jax.Array:
        encoded, states = _encode(params["encoder"], data["source"])
        source = jnp.stack(encoded)
        decoded, _ = _encode(params["decoder"], data["target"], states)
        return _mean_loss([_attend(params, y, source) for y in decoded], data["labels"])

    return Model("nmt_unrolled", loss, scanned.params, scanned.batch, scanned.below)


def _attend(params: Tree, target: jax.Array, source: jax.Array) -> jax.Array:
    """Logits of one step [batch, vocab]. Target [batch, hidden] is the decoder's, source [time, batch, hidden] the encoder's."""
    scores = jnp.einsum("bh,sbh->bs", dense(params["attention"], target), source)
    context = jnp.einsum("bs,sbh->bh", jax.nn.softmax(scores), source)
    joined = jnp.tanh(dense(params["join"], jnp.concatenate([context, target], axis=-1)))
    return dense(params["softmax"], joined)


def _encode(params: Tree, tokens: jax.Array, states: list[State] | None = None) -> tuple[list[jax.Array], list[State]]:
    """Embeds tokens [batch, time] and runs the layers: the last layer's output at each step, and every layer's final state."""
    outputs, batch = [], tokens.shape[0]
    now = states or [_zero_state(layer, batch, params["token"]["table"].dtype) for layer in params["layers"]]
    for t in range(tokens.shape[1]):
        x = params["token"]["table"][tokens[:, t]]
        now = list(_step(params["layers"], now, x))
        outputs.append(now[-1][0])
    return outputs, now


def _step(layers: list[Tree], states: list[State], x: jax.Array) -> Iterator[State]:
    for params, (output, cell) in zip(layers, states, strict=True):
        driven = dense(params["input"], x) + output @ params["recurrent"]["weight"]
        i, f, g, o = jnp.split(driven, 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        x = jax.nn.sigmoid(o) * jnp.tanh(cell)
        yield x, cell


def _zero_state(layer: Tree, batch: int, dtype: jnp.dtype) -> State:
    zero = jnp.zeros((batch, layer["recurrent"]["weight"].shape[0]), dtype)
    return zero, zero


def _mean_loss(logits: list[jax.Array], labels: jax.Array) -> jax.Array:
    """Cross-entropy of every step's logits [batch, classes], with labels [batch, time]."""
    return cross_entropy(jnp.stack(logits), labels.T)
