"""Strategies as people write them by hand in JAX: data parallelism, fully sharded data parallelism, Megatron's tensor parallelism.

Each with `NamedSharding` and `jit`, which leaves communication to XLA; the latter two also with `shard_map`, because XLA's CPU
backend never makes a reduce-scatter of an all-reduce and a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.models.losses import squared_error
from benchmarks.models.model import Model, Tree, f32
from benchmarks.models.transformer import (
    attend,
    causal,
    dense,
    feed_forward,
    feed_forward_params,
    layer_norm,
    norm_params,
    self_attention,
    separate_qkv_params,
)

AXIS = "d"


@dataclass(frozen=True)
class Contender:
    """A training step that gives loss and gradients, and where its arguments lie."""

    name: str
    step: Any  # jitted
    shardings: tuple[Tree, Tree]  # of parameters and batch

    def abstract(self, model: Model) -> tuple[Tree, Tree]:
        """The arguments, of which nothing is allocated."""
        place = partial(jax.tree.map, lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s))
        return place(model.params, self.shardings[0]), place(model.batch, self.shardings[1])


def gpt_block(width: int, heads: int, seq: int, batch: int) -> Model:
    """One pre-norm decoder block, and a squared error to a target."""
    params = {
        "norm1": norm_params(width),
        "attention": separate_qkv_params(width),
        "norm2": norm_params(width),
        "mlp": feed_forward_params(width, 4 * width),
    }

    def loss(params: Tree, data: Tree) -> jax.Array:
        x = data["x"]
        x += self_attention(params["attention"], layer_norm(params["norm1"], x), heads, causal(seq))
        x += feed_forward(params["mlp"], layer_norm(params["norm2"], x))
        return squared_error(x, data["y"])

    data = {name: f32(batch, seq, width) for name in ("x", "y")}
    return Model("gpt_block", loss, params, data, below={"x": 0, "y": 0})


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), (AXIS,), axis_types=(AxisType.Auto,))


def data_parallel(model: Model, mesh: Mesh) -> Contender:
    return _by_xla("data parallel, jit", model, mesh, jax.tree.map(lambda x: P(), model.params), P(AXIS))


def fsdp(model: Model, mesh: Mesh) -> Contender:
    return _by_xla("FSDP, jit", model, mesh, _first_dimension(model.params, mesh), P(AXIS))


def megatron(model: Model, mesh: Mesh) -> Contender:
    return _by_xla("Megatron, jit", model, mesh, megatron_specs(model.params), P())


@dataclass(frozen=True)
class Layers:
    """How the layers of a model are computed on one device. `column` and `row`: dense layers that widen and that narrow again;
    `norm` of what follows a norm; `heads`: of them, how many are here."""

    column: Callable[[Tree, jax.Array], jax.Array]
    row: Callable[[Tree, jax.Array], jax.Array]
    norm: Callable[[Tree, jax.Array], jax.Array]
    heads: int

    def loss(self, params: Tree, data: Tree) -> jax.Array:
        predict = self.block if "attention" in params else self.mlp
        return squared_error(predict(params, data["x"]), data["y"])

    def block(self, params: Tree, x: jax.Array) -> jax.Array:
        attention, mlp = params["attention"], params["mlp"]
        y = self.norm(params["norm1"], x)
        query, key, value = (self.column(attention[name], y) for name in ("query", "key", "value"))
        split = (*x.shape[:2], self.heads, query.shape[-1] // self.heads)
        mixed = attend(query.reshape(split), key.reshape(split), value.reshape(split), causal(x.shape[1]))
        x += self.row(attention["out"], mixed.reshape(query.shape))
        return x + self.row(mlp["down"], jax.nn.gelu(self.column(mlp["up"], self.norm(params["norm2"], x))))

    def mlp(self, params: Tree, x: jax.Array) -> jax.Array:
        names = sorted(params)
        for k, name in enumerate(names):
            x = (self.row if k % 2 else self.column)(params[name], x)
            x = jax.nn.relu(x) if k + 1 < len(names) else x
        return x


def fsdp_by_hand(model: Model, mesh: Mesh, heads: int, again: bool = False) -> Contender:
    """Every weight is gathered for use, which makes its gradient a reduce-scatter; `again`: and once more in the backward pass."""
    specs = _first_dimension(model.params, mesh)

    def whole(shards: Tree, where: Tree) -> Tree:
        gather = partial(lax.all_gather, axis_name=AXIS, tiled=True)
        return jax.tree.map(lambda x, s: gather(x, axis=tuple(s).index(AXIS)) if AXIS in s else x, shards, where)

    def kept(shards: Tree, data: Tree) -> jax.Array:
        return lax.pmean(model.loss(whole(shards, specs), data), AXIS)

    def not_kept(shards: Tree, data: Tree) -> jax.Array:
        # a parameter travels with its place, so that it can be gathered where it is used
        paired = jax.tree.map(_Shard, shards, specs)
        return lax.pmean(Layers(_gathering(dense), _gathering(dense), _gathering(layer_norm), heads).loss(paired, data), AXIS)

    def _gathering(layer: Callable[[Tree, jax.Array], jax.Array]) -> Callable[[Tree, jax.Array], jax.Array]:
        def run(pairs: Tree, x: jax.Array) -> jax.Array:
            shards, where = {k: p.piece for k, p in pairs.items()}, {k: p.spec for k, p in pairs.items()}
            return jax.checkpoint(lambda shards, x: layer(whole(shards, where), x))(shards, x)

        return run

    name = "FSDP again, shard_map" if again else "FSDP, shard_map"
    return _by_hand(name, model, mesh, not_kept if again else kept, specs, P(AXIS))


@dataclass(frozen=True)
class _Shard:
    piece: jax.Array
    spec: P


def megatron_by_hand(model: Model, mesh: Mesh, heads: int) -> Contender:
    """Megatron's two operators are the cast before column-parallel layers and the sum after a row-parallel one."""

    def before(x: jax.Array) -> jax.Array:
        return lax.pcast(x, AXIS, to="varying")

    def row(params: Tree, x: jax.Array) -> jax.Array:
        return lax.psum(x @ params["weight"], AXIS) + params["bias"]

    if "attention" in model.params:  # three layers read what is cast once
        layers = Layers(dense, row, lambda params, x: before(layer_norm(params, x)), heads // mesh.size)
    else:
        layers = Layers(lambda params, x: dense(params, before(x)), row, layer_norm, 0)
    return _by_hand("Megatron, shard_map", model, mesh, layers.loss, megatron_specs(model.params), P())


def megatron_specs(params: Tree) -> Tree:
    """Column-parallel layers are followed by row-parallel ones; norms and the biases of the latter are everywhere."""

    def spec(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> P:
        layer, kind = path[-2].key, path[-1].key
        column = layer in ("query", "key", "value", "up", "dense0", "dense2")
        if layer.startswith("norm") or (not column and kind == "bias"):
            return P()
        return P(AXIS, None) if not column else P(None, AXIS) if kind == "weight" else P(AXIS)

    return jax.tree_util.tree_map_with_path(spec, params)


def _first_dimension(params: Tree, mesh: Mesh) -> Tree:
    """Every parameter is stored in slices of the first dimension that divides."""

    def spec(leaf: jax.ShapeDtypeStruct) -> P:
        dim = next((k for k, n in enumerate(leaf.shape) if n % mesh.size == 0), None)
        return P() if dim is None else P(*(None,) * dim, AXIS)

    return jax.tree.map(spec, params)


def _by_xla(name: str, model: Model, mesh: Mesh, specs: Tree, data: P) -> Contender:
    stored, given = _shardings(model, mesh, specs, data)
    whole = NamedSharding(mesh, P())
    step = jax.jit(jax.value_and_grad(model.loss), in_shardings=(stored, given), out_shardings=(whole, stored))
    return Contender(name, step, (stored, given))


def _by_hand(name: str, model: Model, mesh: Mesh, local: Callable[[Tree, Tree], jax.Array], specs: Tree, data: P) -> Contender:
    of_data = jax.tree.map(lambda x: data, model.batch)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs, of_data), out_specs=P())
    return Contender(name, jax.jit(jax.value_and_grad(mapped)), _shardings(model, mesh, specs, data))


def _shardings(model: Model, mesh: Mesh, specs: Tree, data: P) -> tuple[Tree, Tree]:
    stored = jax.tree.map(lambda x, s: NamedSharding(mesh, s), model.params, specs)
    return stored, jax.tree.map(lambda x: NamedSharding(mesh, data), model.batch)
