"""Recommendation: embedding tables, looked up and joined, and dense layers. DLRM (Naumov et al. 2019) and XDL."""

import jax
import jax.numpy as jnp
import numpy as np

from .layers import Layer, dense, relu, serial, sigmoid
from .losses import click_loss, squared_error
from .model import Model, Tree, f32, i32

CRITEO_KAGGLE = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Rows of the 26 tables of the Criteo Kaggle data."""


def pairwise_products(features: list[jax.Array]) -> jax.Array:
    """The dense feature, and the inner product of every two features: DLRM's own interaction."""
    stacked = jnp.stack(features, axis=1)
    products = jnp.einsum("bid,bjd->bij", stacked, stacked)
    row, column = np.tril_indices(len(features), -1)
    return jnp.concatenate([features[0], products[:, row, column]], axis=-1)


def dlrm(
    *,
    tables: tuple[int, ...] = (1_000_000,) * 4,
    width: int = 64,
    bag: int = 1,
    bottom: tuple[int, ...] = (4, 64, 64),
    top: tuple[int, ...] = (64, 64, 2),
    batch: int = 64,
) -> Model:
    """Unity's released example: features are concatenated, no biases, squared error on a sigmoid.

    `bottom` starts with the number of dense inputs; `top` holds the outputs of its layers.
    """
    dense_net = serial(*_hidden(bottom[1:], bias=False))
    top_net = serial(*_hidden(top[:-1], bias=False), dense(top[-1], bias=False), sigmoid)
    features = len(tables) * width + bottom[-1]

    def loss(params: Tree, data: Tree) -> jax.Array:
        found = lookup(params["tables"], data["sparse"])
        joined = jnp.concatenate([dense_net.apply(params["bottom"], data["dense"]), *found], axis=-1)
        return squared_error(top_net.apply(params["top"], joined), data["label"])

    params = {
        "tables": _tables(tables, width),
        "bottom": dense_net.params(f32(batch, bottom[0])),
        "top": top_net.params(f32(batch, features)),
    }
    sparse, rows = [i32(batch, bag) for _ in tables], list(tables)
    data = {"dense": f32(batch, bottom[0]), "sparse": sparse, "label": f32(batch, top[-1])}
    return Model("dlrm", loss, params, data, below={"dense": 0, "sparse": rows, "label": 0})


def dlrm_kaggle(
    *,
    tables: tuple[int, ...] = CRITEO_KAGGLE,
    width: int = 16,
    bottom: tuple[int, ...] = (13, 512, 256, 64, 16),
    top: tuple[int, ...] = (512, 256, 1),
    batch: int = 128,
) -> Model:
    """DLRM as published for Criteo Kaggle: products of features, biases, log loss. 540,677,217 parameters."""
    dense_net = serial(*_hidden(bottom[1:], bias=True))
    top_net = serial(*_hidden(top[:-1], bias=True), dense(top[-1]))
    features = len(tables) + 1

    def loss(params: Tree, data: Tree) -> jax.Array:
        found = lookup(params["tables"], data["sparse"])
        joined = pairwise_products([dense_net.apply(params["bottom"], data["dense"]), *found])
        return click_loss(top_net.apply(params["top"], joined)[:, 0], data["clicked"])

    params = {
        "tables": _tables(tables, width),
        "bottom": dense_net.params(f32(batch, bottom[0])),
        "top": top_net.params(f32(batch, width + features * (features - 1) // 2)),
    }
    sparse = [i32(batch, 1) for _ in tables]
    data = {"dense": f32(batch, bottom[0]), "sparse": sparse, "clicked": i32(batch)}
    return Model("dlrm_kaggle", loss, params, data, below={"dense": 0, "sparse": list(tables), "clicked": 2})


def xdl(
    *,
    tables: tuple[int, ...] = (1_000_000,) * 4,
    width: int = 64,
    bag: int = 1,
    top: tuple[int, ...] = (256, 256, 2),
    batch: int = 64,
) -> Model:
    """Unity's XDL: tables alone, concatenated, into dense layers without biases."""
    network = serial(*_hidden(top[:-1], bias=False), dense(top[-1], bias=False), sigmoid)

    def loss(params: Tree, data: Tree) -> jax.Array:
        joined = jnp.concatenate(lookup(params["tables"], data["sparse"]), axis=-1)
        return squared_error(network.apply(params["top"], joined), data["label"])

    params = {"tables": _tables(tables, width), "top": network.params(f32(batch, len(tables) * width))}
    data = {"sparse": [i32(batch, bag) for _ in tables], "label": f32(batch, top[-1])}
    return Model("xdl", loss, params, data, below={"sparse": list(tables), "label": 0})


def lookup(tables: Tree, rows: list[jax.Array]) -> list[jax.Array]:
    """A bag of rows of each table, summed. Rows [batch, bag] -> [batch, width] each."""
    return [jnp.sum(table["table"][row], axis=1) for table, row in zip(tables, rows, strict=True)]


def _tables(rows: tuple[int, ...], width: int) -> Tree:
    return [{"table": f32(count, width)} for count in rows]


def _hidden(widths: tuple[int, ...], bias: bool) -> list[Layer]:
    return [layer for width in widths for layer in (dense(width, bias), relu)]
