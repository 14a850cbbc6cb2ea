"""Lowering of a parallel graph to JAX: one `shard_map` of local programs and explicit collectives, inside of `jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from unity.exec.accumulated_gradients import accumulated
from unity.exec.branches import branched
from unity.exec.context import own
from unity.exec.pipelines.gpipe import pipelined, summed
from unity.exec.pipelines.half_ticks import PipelinePair
from unity.exec.pipelines.one_forward_one_backward import alternated
from unity.exec.sharding_constraints import SHARDED, constrain, constrained, own_sharding
from unity.exec.tied_gradients import with_tied_gradients
from unity.pcg.analysis.policies import on_device
from unity.pcg.analysis.recomputation_marks import runs_again
from unity.pcg.ir.graph import BRANCHES, PARALLELIZATION, PCG, PIPELINE, STAGES, TAIL, Node, Value, accumulated_loss
from unity.pcg.ir.payloads import Remat, Scan, Sharded
from unity.pcg.ir.user_lines import label, source_of_use
from unity.pcg.local import varying_loops as loops
from unity.pcg.local.collectives import apply
from unity.pcg.local.interpreter import run_body
from unity.pcg.parallel.stages import FOLLOWED, ends_of, schedule_of
from unity.pcg.parallel.traffic import step_of
from unity.pcg.types.accumulation import storage_dtype
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, Type
from unity.pcg.types.varying_axes import vary


def mesh_of(axes: Sequence[Axis], devices: Sequence[Any]) -> Mesh:
    """Return the mesh of prime axes, outermost level first. Raises ValueError if there are fewer devices than the axes need."""
    sizes, names = tuple(a.size for a in axes) or (1,), tuple(a.name for a in axes) or ("d0",)
    return Mesh(np.asarray(devices[: prod(sizes)]).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(sizes))


def platform_of(mesh: Mesh) -> str:
    """Return JAX's name of the platform of a mesh's devices: "cpu", "gpu"."""
    return mesh.devices.flat[0].platform


def spec_of(type_: Type, axes: Sequence[Axis], rank: int) -> PartitionSpec:
    """Return the partition specification of a boundary type. It has only unused and (most major) partitioned states."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    for state, axis in zip(type_, axes, strict=True):
        if state.kind == "P":
            assert state.outer == 1, "arguments and results are partitioned at their most major digit"
            dims[state.dim].append(axis.name)
        else:
            assert state == UNUSED, f"a {state} tensor cannot cross the program's boundary"
    return PartitionSpec(*(tuple(d) if len(d) > 1 else (d[0] if d else None) for d in dims))


@dataclass(frozen=True)
class LoweringOptions:
    """How a parallel graph is run, beside what it says itself.

    Attributes:
        offloads: whether checkpoint policies may offload values to the host. Stages and branches are alternatives of a `switch`,
            whose residuals must all be in one memory.
        ties: whether the gradients of a product's operands are computed together (`exec.tied_gradients`).
    """

    offloads: bool = True
    ties: bool = False


def program(graph: PCG, mesh: Mesh, ties: bool = False) -> Callable[..., tuple]:
    """Return the function that a parallel graph computes, of whole arrays with any sharding.

    `ties`: whether a product's gradients are computed together on devices that would compute one of them late.
    """
    options = LoweringOptions(ties=ties and platform_of(mesh) != "cpu")
    into = tuple(spec_of(n.types[0], graph.axes, n.tensors[0].ndim) for n in graph.inputs)
    out = tuple(spec_of(v.type, graph.axes, v.tensor.ndim) for v in graph.outputs)
    mapped = jax.shard_map(lambda *pieces: tuple(run_graph(graph, pieces, options)), mesh=mesh, in_specs=into, out_specs=out)

    def placed_by_plan_shard(leaves: Sequence[Any]) -> list[Any]:
        # The constraint names the devices: without it, arguments on a single device would keep the whole program there.
        # JAX's error for arguments of `jax.jit` that are committed elsewhere names this function, which tells the way out.
        return [lax.with_sharding_constraint(x, NamedSharding(mesh, s)) for x, s in zip(leaves, into, strict=True)]

    def call(*leaves: Any) -> tuple:
        with own(mesh):
            return mapped(*placed_by_plan_shard(leaves))

    return call


def partitioned_program(graph: PCG, mesh: Mesh) -> Callable[..., tuple]:
    """Return the function that a parallel graph computes, of whole arrays that XLA partitions (`exec.sharding_constraints`)."""
    whole = constrained(graph, mesh)
    into, out = ([own_sharding(v, graph, mesh) for v in values] for values in (map(Value, graph.inputs), graph.outputs))

    def call(*leaves: Any) -> tuple:
        with own(mesh):
            results = run_graph(whole, [constrain(x, s) for x, s in zip(leaves, into, strict=True)])
            return tuple(constrain(x, s) for x, s in zip(results, out, strict=True))

    return call


@dataclass(frozen=True)
class Rematerialized:
    """A rematerialized value: its users compute it from its sources, and again in the backward pass."""

    sources: tuple[Any, ...]
    compute: Callable[..., Any]

    @property
    def value(self) -> Any:
        return self.compute(*self.sources)

    def then(self, step: Callable[[Any], Any]) -> Rematerialized:
        """Return the value with one more step applied."""
        return Rematerialized(self.sources, lambda *sources: step(self.compute(*sources)))


@dataclass(frozen=True)
class PendingPipeline:
    """A placeholder for a result of a pipeline that has not run yet, because its tail runs both in one loop."""

    pipeline: Node
    operands: tuple[Any, ...]


def run_graph(graph: PCG, pieces: Sequence[Any], options: LoweringOptions = LoweringOptions()) -> list:
    """Run a parallel graph on one device's pieces, inside of `shard_map`."""
    env: dict[Value, Any] = {}
    for node, x in zip(graph.inputs, pieces, strict=True):
        env[Value(node)] = x
    for node in graph.nodes[len(graph.inputs) :]:
        operands = [env[v] for v in node.operands]
        with jax.named_scope(label(node, source_of_use(node, graph))):
            results = _pending(node, operands, graph) or _run_node(node, operands, graph.axes, options)
        env.update((Value(node, k), x) for k, x in enumerate(results))
    return [settle(v, env[v], graph.axes) for v in graph.outputs]


def _pending(node: Node, operands: list, graph: PCG) -> list:
    """Return placeholders for the results of a pipeline that its tail will run, or an empty list for any other node."""
    if node.kind != PIPELINE or schedule_of(node).kind not in FOLLOWED:
        return []
    settled = [settle(v, x, graph.axes) for v, x in zip(node.operands, operands, strict=True)]
    return [PendingPipeline(node, tuple(settled))] * len(node.tensors)


def settle(v: Value, x: Any, axes: tuple[Axis, ...]) -> Any:
    """Return a value in its stored element type, made to vary for JAX along exactly the axes that its type uses."""
    if isinstance(x, PendingPipeline):
        return x
    if isinstance(x, Rematerialized):
        x = x.value
    own = storage_dtype(v.tensor.dtype, v.type, axes)
    x = x.astype(own) if x.dtype != own else x
    return vary(x, [a.name for a, s in zip(axes, v.type, strict=True) if s != UNUSED])


def _run_node(node: Node, operands: list, axes: tuple[Axis, ...], options: LoweringOptions) -> list:
    if node.kind in PARALLELIZATION:
        return [_change(node, operands[0], axes)]
    if runs_again(node):
        return [_rematerialized(node, operands, axes, options)]
    if any(isinstance(x, Rematerialized) for x in operands):
        return _checkpointed(node, operands, axes, options)
    return _compute(node, operands, axes, options)


def _change(node: Node, x: Any, axes: tuple[Axis, ...]) -> Any:
    if node.kind == "view":
        return x
    step = step_of(node, axes)
    dtype = node.tensors[0].dtype
    if isinstance(x, Rematerialized):
        return x.then(lambda x: apply(step, x, axes, dtype))
    x = settle(node.operands[0], x, axes)
    return Rematerialized((x,), lambda x: apply(step, x, axes, dtype)) if node.again else apply(step, x, axes, dtype)


def _rematerialized(node: Node, operands: list, axes: tuple[Axis, ...], options: LoweringOptions) -> Rematerialized:
    """Return the rematerialized result of an operator, which its user computes."""
    sources, run = _recomputation(node, operands, axes, options)

    def compute(*values: Any) -> Any:
        with jax.named_scope(label(node)):
            (result,) = run(*values)
        return result

    return Rematerialized(sources, compute)


def _checkpointed(node: Node, operands: list, axes: tuple[Axis, ...], options: LoweringOptions) -> list:
    """Run an operator with a rematerialized operand, in one checkpoint around both.

    The slices that neighbours send for its halos are saved, so that the backward pass repeats only marked changes of type.
    """
    sources, run = _recomputation(node, operands, axes, options)
    return jax.checkpoint(run, policy=lambda primitive, *_, **__: primitive.name == "ppermute")(*sources)


def _recomputation(
    node: Node, operands: list, axes: tuple[Axis, ...], options: LoweringOptions
) -> tuple[tuple[Any, ...], Callable[..., list]]:
    """Return the sources of an operator's operands, and the function that computes the operator's results from them."""
    parts = [x.sources if isinstance(x, Rematerialized) else (x,) for x in operands]

    def run(*values: Any) -> list:
        left = iter(values)
        grouped = [[next(left) for _ in part] for part in parts]
        ready = [x.compute(*own) if isinstance(x, Rematerialized) else own[0] for x, own in zip(operands, grouped, strict=True)]
        return _compute(node, ready, axes, options)

    return tuple(x for part in parts for x in part), run


def _compute(node: Node, operands: list, axes: tuple[Axis, ...], options: LoweringOptions) -> list:
    operands = [settle(v, x, axes) for v, x in zip(node.operands, operands, strict=True)]
    if accumulated_loss(node) is not None:
        results = accumulated(node, operands, axes, _inside(node, options))
    elif node.kind == "scan":
        results = _scan(node, operands, axes, options)
    elif node.kind == SHARDED:
        results = [constrain(operands[0], node.of(Sharded))]
    elif node.kind == PIPELINE:
        results = pipelined(node, operands, _inside(node, replace(options, offloads=False)))
    elif node.kind == TAIL:
        results = _tail(node, operands, replace(options, offloads=False))
    elif node.kind in (BRANCHES, STAGES):
        results = branched(node, operands, partial(run_graph, options=replace(options, offloads=False)), axes)
    elif node.kind == "remat":
        policy = node.policy if options.offloads else on_device(node.policy)
        run = jax.checkpoint(_inside(node, options), prevent_cse=node.of(Remat).prevent_cse, policy=policy)
        results = run(*operands)
    else:
        results = _body(node, axes)(*(with_tied_gradients(node, operands) if options.ties else operands))
    return [settle(v, x, axes) for v, x in zip(node.results, results, strict=True)]


def _inside(node: Node, options: LoweringOptions) -> Callable[..., list]:
    """Return the local program of the graph inside of a node."""
    inside = node.inside
    assert inside is not None
    return lambda *pieces: run_graph(inside, pieces, options)


def _tail(node: Node, operands: list, options: LoweringOptions) -> list:
    """Run a tail together with its pipeline, or alone if the pipeline has run already."""
    pending = next((x for x in operands if isinstance(x, PendingPipeline)), None)
    if pending is None:
        return summed(node, operands, _inside(node, options))
    more = [x for x in operands if not isinstance(x, PendingPipeline)]
    return alternated(pair_of(node, options), [*pending.operands, *more])


def pair_of(tail: Node, options: LoweringOptions = LoweringOptions(offloads=False)) -> PipelinePair:
    """Return a tail and the pipeline that it follows, with their local programs."""
    pipeline = tail.operands[ends_of(tail).carried.start].node
    return PipelinePair(pipeline, tail, _inside(pipeline, options), _inside(tail, options))


def _body(node: Node, axes: tuple[Axis, ...]) -> Callable[..., list]:
    """Return an operator's local program; a checkpoint is around it if its inner values are recomputed."""
    body = node.body
    assert body is not None, node

    def run(*operands: Any) -> list:
        return run_body(body, operands, [v.type for v in node.operands], node.types, axes)

    return jax.checkpoint(run) if node.again and not runs_again(node) else run


def _scan(node: Node, operands: list, axes: tuple[Axis, ...], options: LoweringOptions) -> list:
    assert node.inside is not None
    inside, loop = node.inside, node.of(Scan)
    c, k = loop.consts, loop.carry

    def step(carry: Any, xs: Any) -> Any:
        out = run_graph(inside, (*operands[:c], *carry, *xs), options)
        return out[:k], out[k:]

    carry, ys = loops.scan(step, operands[c : c + k], operands[c + k :], loop.length, loop.reverse, loop.unroll)
    return [*carry, *ys]
