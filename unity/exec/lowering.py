"""From a parallel PCG to JAX: one `shard_map` of local bodies and explicit collectives, inside `jit` (design section 7)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from unity.exec.parallel import apply, vary
from unity.exec.pipeline import pipelined
from unity.exec.walker import run_body
from unity.pcg.axis import Axis
from unity.pcg.graph import PARALLELIZATION, PCG, PIPELINE, Node, Value
from unity.pcg.resharding import Step
from unity.pcg.state import UNUSED, Type
from unity.pcg.traffic import step_of


def mesh_of(axes: Sequence[Axis], devices: Sequence[Any]) -> Mesh:
    """The mesh of prime axes, outermost level first. Raises ValueError if there are fewer devices than the axes need."""
    sizes, names = tuple(a.size for a in axes) or (1,), tuple(a.name for a in axes) or ("d0",)
    count = 1
    for n in sizes:
        count *= n
    return Mesh(np.asarray(devices[:count]).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(sizes))


def spec_of(type_: Type, axes: Sequence[Axis], rank: int) -> PartitionSpec:
    """A type at the program's boundary, as JAX writes it. Only unused and (most major) partitioned states occur there."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    for state, axis in zip(type_, axes, strict=True):
        if state.kind == "P":
            assert state.outer == 1, "arguments and results are partitioned at their most major digit"
            dims[state.dim].append(axis.name)
        else:
            assert state == UNUSED, f"a {state} tensor cannot cross the program's boundary"
    return PartitionSpec(*(tuple(d) if len(d) > 1 else (d[0] if d else None) for d in dims))


def program(graph: PCG, mesh: Mesh) -> Callable[..., tuple]:
    """The function that a parallel graph means: takes and gives whole arrays, wherever they lie."""
    into = tuple(spec_of(n.types[0], graph.axes, n.tensors[0].ndim) for n in graph.inputs)
    out = tuple(spec_of(v.type, graph.axes, v.tensor.ndim) for v in graph.outputs)
    mapped = jax.shard_map(lambda *pieces: tuple(run_graph(graph, pieces)), mesh=mesh, in_specs=into, out_specs=out)

    def call(*leaves: Any) -> tuple:
        # the constraint names real devices: arguments that lie on one would otherwise keep the whole program there
        placed = (lax.with_sharding_constraint(x, NamedSharding(mesh, s)) for x, s in zip(leaves, into, strict=True))
        return mapped(*placed)

    return call


@dataclass(frozen=True)
class Again:
    """A gathered value that is not kept: its users gather it themselves, and once more in the backward pass."""

    base: Any
    steps: tuple[Step, ...]

    def gather(self, x: Any, axes: tuple[Axis, ...]) -> Any:
        for step in self.steps:
            x = apply(step, x, axes)
        return x


def label(node: Node) -> str:
    """An operator's name in traces and profiles of the program: its kind and the user's line, "softmax@model.py:42"."""
    file, _, line = node.source.partition(" (")[0].rpartition(":")
    where = f"{os.path.basename(file)}:{line}" if file else ""
    return re.sub(r"[^\w\-. +]", "", node.kind) + "@" + re.sub(r"[^\w\-. +:]", "", where)


def run_graph(graph: PCG, pieces: Sequence[Any]) -> list:
    """Runs a parallel graph on one device's pieces; called inside `shard_map`."""
    env: dict[Value, Any] = {}
    for node, x in zip(graph.inputs, pieces, strict=True):
        env[Value(node)] = x
    for node in graph.nodes:
        if node.kind != "input":
            operands = [env[v] for v in node.operands]
            with jax.named_scope(label(node)):
                results = _run_node(node, operands, graph.axes)
            env.update((Value(node, k), x) for k, x in enumerate(results))
    return [settle(v, env[v], graph.axes) for v in graph.outputs]


def settle(v: Value, x: Any, axes: tuple[Axis, ...]) -> Any:
    """A value that varies, for JAX, along exactly the axes that its type uses (a constant may not)."""
    if isinstance(x, Again):
        x = x.gather(x.base, axes)
    return vary(x, [a.name for a, s in zip(axes, v.type, strict=True) if s != UNUSED])


def _run_node(node: Node, operands: list, axes: tuple[Axis, ...]) -> list:
    if node.kind in PARALLELIZATION:
        return [_change(node, operands[0], axes)]
    if any(isinstance(x, Again) for x in operands):
        return _gathering(node, operands, axes)
    return _compute(node, operands, axes)


def _change(node: Node, x: Any, axes: tuple[Axis, ...]) -> Any:
    if node.kind == "view":
        return x
    step = step_of(node, axes)
    if isinstance(x, Again):
        return Again(x.base, (*x.steps, step))
    if node.attributes.get("again"):
        return Again(settle(node.operands[0], x, axes), (step,))
    return apply(step, settle(node.operands[0], x, axes), axes)


def _gathering(node: Node, operands: list, axes: tuple[Axis, ...]) -> list:
    """An operator whose weight is gathered again in the backward pass: the checkpoint is around both (design section 7).

    What neighbours have sent for its halos is kept: nothing else is communicated again.
    """
    bases = [x.base if isinstance(x, Again) else x for x in operands]

    def both(*given: Any) -> list:
        ready = [x.gather(g, axes) if isinstance(x, Again) else g for x, g in zip(operands, given, strict=True)]
        return _compute(node, ready, axes)

    return jax.checkpoint(both, policy=lambda primitive, *_, **__: primitive.name == "ppermute")(*bases)


def _compute(node: Node, operands: list, axes: tuple[Axis, ...]) -> list:
    operands = [settle(v, x, axes) for v, x in zip(node.operands, operands, strict=True)]
    if node.kind == "scan":
        results = _scan(node, operands, axes)
    elif node.kind == PIPELINE:
        inside = node.inside
        assert inside is not None
        results = pipelined(node, operands, lambda *pieces: run_graph(inside, pieces))
    elif node.kind == "remat":
        assert node.inside is not None
        inside = node.inside
        run = jax.checkpoint(
            lambda *x: run_graph(inside, x), prevent_cse=bool(node.attributes["prevent_cse"]), policy=node.policy
        )
        results = run(*operands)
    else:
        results = _body(node, axes)(*operands)
    return [settle(v, x, axes) for v, x in zip(node.results, results, strict=True)]


def _body(node: Node, axes: tuple[Axis, ...]) -> Callable[..., list]:
    """An operator's local program; if its inner values are not kept, it runs once more in the backward pass."""
    body = node.body
    assert body is not None, node

    def run(*operands: Any) -> list:
        return run_body(body, operands, [v.type for v in node.operands], node.types, axes)

    return jax.checkpoint(run) if node.attributes.get("again") else run


def _scan(node: Node, operands: list, axes: tuple[Axis, ...]) -> list:
    assert node.inside is not None
    inside, c, k = node.inside, int(node.attributes["consts"]), int(node.attributes["carry"])

    def step(carry: Any, xs: Any) -> Any:
        out = run_graph(inside, (*operands[:c], *carry, *xs))
        return out[:k], out[k:]

    length, reverse, unroll = (node.attributes[name] for name in ("length", "reverse", "unroll"))
    carry, ys = lax.scan(step, operands[c : c + k], operands[c + k :], length, reverse, unroll)
    return [*carry, *ys]
