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


def fsdp_by_hand(model: Model, mesh: Mesh) -> Contender:
    """Every weight is gathered for use, which makes its gradient a reduce-scatter."""
    specs = _first_dimension(model.params, mesh)

    def local(params: Tree, data: Tree) -> jax.Array:
        # a checkpoint around each layer would gather again backward; the CPU backend undoes that in straight-line code
        whole = jax.tree.map(lambda x, s: lax.all_gather(x, AXIS, axis=s.index(AXIS), tiled=True) if AXIS in s else x, params, specs)
        return lax.pmean(model.loss(whole, data), AXIS)

    return _by_hand("FSDP, shard_map", model, mesh, local, specs, P(AXIS))


def megatron_by_hand(model: Model, mesh: Mesh, heads: int = 0) -> Contender:
    """Megatron's two operators are the cast before a column-parallel layer and the sum after a row-parallel one."""
    n = mesh.size

    def before(x: jax.Array) -> jax.Array:
        return lax.pcast(x, AXIS, to="varying")

    def after(params: Tree, x: jax.Array) -> jax.Array:
        return lax.psum(x @ params["weight"], AXIS) + params["bias"]

    def block(params: Tree, data: Tree) -> jax.Array:
        x = data["x"]
        own, y = params["attention"], before(layer_norm(params["norm1"], x))
        split = (*x.shape[:2], heads // n, x.shape[2] // heads)
        query, key, value = (dense(own[name], y).reshape(split) for name in ("query", "key", "value"))
        mixed = attend(query, key, value, causal(x.shape[1])).reshape(*x.shape[:2], -1)
        x += after(own["out"], mixed)
        own, y = params["mlp"], before(layer_norm(params["norm2"], x))
        x += after(own["down"], jax.nn.gelu(dense(own["up"], y)))
        return squared_error(x, data["y"])

    def mlp(params: Tree, data: Tree) -> jax.Array:
        x, names = data["x"], sorted(params)
        for k in range(0, len(names), 2):
            hidden = jax.nn.relu(dense(params[names[k]], before(x)))
            x = after(params[names[k + 1]], hidden)
            x = jax.nn.relu(x) if k + 2 < len(names) else x
        return squared_error(x, data["y"])

    local = block if "attention" in model.params else mlp
    return _by_hand("Megatron, shard_map", model, mesh, local, megatron_specs(model.params), P())


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
