"""Graph networks (jraph), equivariant networks (e3nn-jax), normalizing flows (distrax)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.packages.package import Abstract, Case, model


@model("jraph", "graph network")
def graph_network() -> Case:
    """No batch: nodes and edges, gathered and summed by segments."""
    import jraph  # pyright: ignore[reportMissingImports]

    nodes, edges, width, layers = 10000, 50000, 128, 5

    def dense(p: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ p["w"] + p["b"])

    def apply(params: Any, graph: Any) -> Any:
        for p in params:
            step = jraph.GraphNetwork(
                update_edge_fn=lambda e, s, r, g, p=p: dense(p["edge"], jnp.concatenate([e, s, r], -1)),
                update_node_fn=lambda n, s, r, g, p=p: dense(p["node"], jnp.concatenate([n, s, r], -1)),
            )
            graph = step(graph)
        return graph

    def weights(inputs: int) -> Any:
        return {"w": Abstract((inputs, width), jnp.float32), "b": Abstract((width,), jnp.float32)}

    params = [{"edge": weights(3 * width), "node": weights(3 * width)} for _ in range(layers)]
    f, i = jnp.float32, jnp.int32
    graph = jraph.GraphsTuple(
        nodes=Abstract((nodes, width), f), edges=Abstract((edges, width), f), senders=Abstract((edges,), i),
        receivers=Abstract((edges,), i), globals=None, n_node=Abstract((1,), i), n_edge=Abstract((1,), i),
    )  # fmt: skip

    def loss(params: Any, graph: Any, target: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(apply(params, graph).nodes - target))

    return loss, (params, graph, Abstract((nodes, width), f))


@model("e3nn-jax", "equivariant tensor products")
def equivariant() -> Case:
    """Spherical harmonics and Clebsch-Gordan products: many small contractions over closed-over tables."""
    import e3nn_jax as e3nn  # pyright: ignore[reportMissingImports]

    inside = e3nn.Irreps("32x0e + 32x1o + 16x2e")
    edges, nodes = 4096, 512

    def loss(params: Any, x: jax.Array, positions: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        features = e3nn.IrrepsArray(inside, x)
        for p in params:
            offsets = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
            harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", offsets, True)
            messages = e3nn.tensor_product(features[senders], harmonics, filter_ir_out=["0e", "1o", "2e"])
            gathered = e3nn.scatter_sum(messages, dst=receivers, output_size=nodes)
            linear = e3nn.FunctionalLinear(gathered.irreps, inside)
            features = jax.vmap(lambda row, linear=linear, p=p: linear(p, row))(gathered)
        return jnp.mean(jnp.square(features.array))

    harmonics = e3nn.Irreps("0e + 1o + 2e")
    wide = e3nn.tensor_product(inside, harmonics, filter_ir_out=["0e", "1o", "2e"])
    linear = e3nn.FunctionalLinear(wide, inside)
    weights = [Abstract(i.path_shape, jnp.float32) for i in linear.instructions]
    f, i32 = jnp.float32, jnp.int32
    arguments = (
        [weights] * 2, Abstract((nodes, inside.dim), f), Abstract((nodes, 3), f), Abstract((edges,), i32), Abstract((edges,), i32)
    )  # fmt: skip
    return loss, arguments


@model("distrax", "masked coupling flow")
def normalizing_flow() -> Case:
    import distrax  # pyright: ignore[reportMissingImports]

    width, layers, hidden = 64, 8, 256

    def conditioner(p: Any) -> Callable[[jax.Array], Any]:
        def net(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ p["a"]) @ p["b"]

        return net

    def loss(params: Any, x: jax.Array) -> jax.Array:
        flow = distrax.Chain([
            distrax.MaskedCoupling(
                jnp.arange(width) % 2 == k % 2, conditioner(p),
                lambda q: distrax.ScalarAffine(q[..., :width], log_scale=q[..., width:]),
            )
            for k, p in enumerate(params)
        ])  # fmt: skip
        base = distrax.MultivariateNormalDiag(jnp.zeros(width), jnp.ones(width))
        return -jnp.mean(distrax.Transformed(base, flow).log_prob(x))

    one = {"a": Abstract((width, hidden), jnp.float32), "b": Abstract((hidden, 2 * width), jnp.float32)}
    return loss, ([one] * layers, Abstract((512, width), jnp.float32))
