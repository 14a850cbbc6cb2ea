"""CANDLE-Uno (tumour response to a pair of drugs), at the sizes of Unity's released example: 821 M parameters."""

import jax
import jax.numpy as jnp

from .layers import dense, relu, serial
from .losses import squared_error
from .model import Model, Tree, f32

FEATURES = {"cell": ("cell",), "descriptors": ("drug1", "drug2"), "fingerprints": ("drug1", "drug2")}
"""Kinds of measurement, and whose they are; each of the five has a tower of its own."""


def candle_uno(
    *,
    cell: int = 942,
    descriptors: int = 5270,
    fingerprints: int = 2048,
    width: int = 4192,
    tower_layers: int = 8,
    top_layers: int = 4,
    batch: int = 64,
) -> Model:
    """Towers of dense layers over five inputs, joined with two doses; no biases; squared error of the growth."""
    tower = serial(*(layer for _ in range(tower_layers) for layer in (dense(width, bias=False), relu)))
    hidden = (layer for _ in range(top_layers) for layer in (dense(width, bias=False), relu))
    top = serial(*hidden, dense(1, bias=False))
    sizes = {"cell": cell, "descriptors": descriptors, "fingerprints": fingerprints}
    inputs = {f"{kind}_{owner}": sizes[kind] for kind, owners in FEATURES.items() for owner in owners}

    def loss(params: Tree, data: Tree) -> jax.Array:
        encoded = [tower.apply(params[name], data[name]) for name in inputs]
        joined = jnp.concatenate([data["doses"], *encoded], axis=-1)
        return squared_error(top.apply(params["top"], joined), data["growth"])

    data = {name: f32(batch, size) for name, size in inputs.items()}
    params = {name: tower.params(x) for name, x in data.items()}
    params["top"] = top.params(f32(batch, len(inputs) * width + 2))
    data |= {"doses": f32(batch, 2), "growth": f32(batch, 1)}
    return Model("candle_uno", loss, params, data, below=dict.fromkeys(data, 0))
