"""LSTM networks of FlexFlow's evaluation (section 8.1). Sequences are [time, batch, width] where they are scanned.

The paper gives layers, hidden sizes and 40 steps; the vocabularies are the data sets' usual ones.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .losses import cast, cross_entropy
from .model import Model, Tree, f32, i32
from .transformer import dense, dense_params


def rnnlm(
    *,
    layers: int = 2,
    hidden: int = 2048,
    vocab: int = 10_000,
    steps: int = 40,
    batch: int = 64,
    compute: str = "float32",
) -> Model:
    """Language model on the Penn Treebank: the next word at each step. `compute` is the precision of activations over float32
    parameters, which each step casts for itself, as cells of neural network libraries do."""
    dtype = jnp.dtype(compute)

    def loss(params: Tree, data: Tree) -> jax.Array:
        outputs, _ = encode(params, data["tokens"], dtype=dtype)
        return cross_entropy(dense(cast(params["softmax"], dtype), outputs), data["labels"].T)

    params = _encoder_params(layers, hidden, vocab) | {"softmax": dense_params(hidden, vocab)}
    data = {"tokens": i32(batch, steps), "labels": i32(batch, steps)}
    return Model("rnnlm", loss, params, data, below={"tokens": vocab, "labels": vocab})


def rnntc(
    *,
    layers: int = 4,
    hidden: int = 1024,
    vocab: int = 20_000,
    classes: int = 2,
    steps: int = 40,
    batch: int = 64,
) -> Model:
    """Text classification on movie reviews: one label, from the last step."""

    def loss(params: Tree, data: Tree) -> jax.Array:
        outputs, _ = encode(params, data["tokens"])
        return cross_entropy(dense(params["softmax"], outputs[-1]), data["label"])

    params = _encoder_params(layers, hidden, vocab) | {"softmax": dense_params(hidden, classes)}
    data = {"tokens": i32(batch, steps), "label": i32(batch)}
    return Model("rnntc", loss, params, data, below={"tokens": vocab, "label": classes})


def nmt(*, layers: int = 2, hidden: int = 1024, vocab: int = 32_000, steps: int = 40, batch: int = 64) -> Model:
    """Translation: the decoder starts from the encoder's states and attends to its outputs (Luong et al. 2015)."""

    def loss(params: Tree, data: Tree) -> jax.Array:
        source, states = encode(params["encoder"], data["source"])
        target, _ = encode(params["decoder"], data["target"], states)
        scores = jnp.einsum("tbh,sbh->bts", dense(params["attention"], target), source)
        context = jnp.einsum("bts,sbh->tbh", jax.nn.softmax(scores), source)
        joined = jnp.tanh(dense(params["join"], jnp.concatenate([context, target], axis=-1)))
        return cross_entropy(dense(params["softmax"], joined), data["labels"].T)

    params = {
        "encoder": _encoder_params(layers, hidden, vocab),
        "decoder": _encoder_params(layers, hidden, vocab),
        "attention": dense_params(hidden, hidden),
        "join": dense_params(2 * hidden, hidden),
        "softmax": dense_params(hidden, vocab),
    }
    below = dict.fromkeys(("source", "target", "labels"), vocab)
    return Model("nmt", loss, params, {name: i32(batch, steps) for name in below}, below)


F32 = jnp.dtype(jnp.float32)
State = tuple[jax.Array, jax.Array]
"""An LSTM's output and cell, both [batch, hidden]."""


def encode(
    params: Tree, tokens: jax.Array, states: list[State] | None = None, dtype: jnp.dtype = F32
) -> tuple[jax.Array, list[State]]:
    """Embeds tokens [batch, time] and runs the layers: the last layer's outputs, and every layer's final state."""
    x = params["token"]["table"][tokens.T].astype(dtype)
    first = states or [_zero_state(layer, x) for layer in params["layers"]]
    final = []
    for layer, state in zip(params["layers"], first, strict=True):
        state, x = lstm(layer, state, x)
        final.append(state)
    return x, final


def lstm(params: Tree, state: State, inputs: jax.Array) -> tuple[State, jax.Array]:
    """One layer over inputs [time, batch, width]: the final state, and the outputs [time, batch, hidden]."""
    # the inputs' product does not wait for the state, so it is one large product outside of the loop
    driven = dense(cast(params["input"], inputs.dtype), inputs)

    def step(state: State, drive: jax.Array) -> tuple[State, jax.Array]:
        output, cell = state
        i, f, g, o = jnp.split(drive + output @ params["recurrent"]["weight"].astype(output.dtype), 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        output = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (output, cell), output

    return lax.scan(step, state, driven)


def _zero_state(layer: Tree, x: jax.Array) -> State:
    zero = jnp.zeros((x.shape[1], layer["recurrent"]["weight"].shape[0]), x.dtype)
    return zero, zero


def _encoder_params(layers: int, hidden: int, vocab: int) -> Tree:
    layer = {"input": dense_params(hidden, 4 * hidden), "recurrent": {"weight": f32(hidden, 4 * hidden)}}
    return {"token": {"table": f32(vocab, hidden)}, "layers": [layer] * layers}
