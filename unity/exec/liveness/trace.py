"""The step of a plan as JAX traces it: the very program that is compiled, without devices and without compiling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType

from unity.exec.lowering import run_graph, spec_of
from unity.exec.two_buffered_weights import Streamed
from unity.pcg.ir.graph import PCG
from unity.pcg.jaxprs.mesh_context import apart


def gradient_step(run: Callable[..., Any], count: int, weights: Sequence[int], ends: Sequence[int]) -> Callable[[list, list], Any]:
    """The gradients, for chosen leaves, of the sum of the results at `ends`, and all results. `count`: the number of leaves."""
    position = {k: i for i, k in enumerate(weights)}

    def step(chosen: list, others: list) -> Any:
        def scalar(chosen: list) -> Any:
            given = iter(others)
            full = [chosen[position[k]] if k in position else next(given) for k in range(count)]
            out = run(*full)
            return sum(jnp.sum(jnp.real(out[k])) for k in ends), out

        return jax.grad(scalar, has_aux=True)(chosen)

    return step


def streamed(graph: PCG, weights: Sequence[int]) -> core.ClosedJaxpr:
    """One step of a parallel graph with a pipeline by 2BW, which takes a flight, and gives it last."""
    with apart():
        return Streamed(graph, _mesh(graph), tuple(weights)).traced()


def _mesh(graph: PCG) -> AbstractMesh:
    sizes, names = tuple(a.size for a in graph.axes) or (1,), tuple(a.name for a in graph.axes) or ("d0",)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


def traced(graph: PCG, weights: Sequence[int], ends: Sequence[int]) -> core.ClosedJaxpr:
    """One step of a parallel graph: its results, and, if `weights` are given, before them the gradients of those inputs.

    The chosen inputs come first, then the others. All of the work is inside `shard_map`, where shapes are those of the pieces.
    """
    mesh = _mesh(graph)
    into = tuple(spec_of(n.types[0], graph.axes, n.tensors[0].ndim) for n in graph.inputs)
    out = tuple(spec_of(v.type, graph.axes, v.tensor.ndim) for v in graph.outputs)
    run = jax.shard_map(lambda *pieces: tuple(run_graph(graph, pieces)), mesh=mesh, in_specs=into, out_specs=out)
    leaves = [n.tensors[0].struct for n in graph.inputs]
    with apart():
        if not weights:
            return jax.make_jaxpr(run)(*leaves)
        chosen = set(weights)
        others = [x for k, x in enumerate(leaves) if k not in chosen]
        return jax.make_jaxpr(gradient_step(run, len(leaves), weights, ends))([leaves[k] for k in weights], others)
