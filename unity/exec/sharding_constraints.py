"""A parallel graph for XLA's partitioner: its operators on whole arrays, with sharding constraints where types change.

Constraints are at the end of every change of type, at operators that are partitioned along axes that partition none of their
operands (a constant, an iota), and at arguments and results. Everything else is left to the partitioner, as is everything that a
`PartitionSpec` cannot state: partial sums, and dimensions that are partitioned at an inner digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unity.base.errors import PlanError
from unity.pcg.ir.graph import BRANCHES, PARALLELIZATION, PCG, PIPELINE, STAGES, TAIL, Node, Value
from unity.pcg.ir.payloads import Recompute, Sharded
from unity.pcg.ir.user_lines import label, source_of_use
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, Type

SHARDED = "sharded"  # a value with sharding constraints for itself and its cotangent
PER_DEVICE = frozenset({PIPELINE, TAIL, STAGES, BRANCHES})  # devices run different operators at a time


def constrained(graph: PCG, mesh: Mesh) -> PCG:
    """Return the graph of whole arrays that a parallel graph computes, with constraints on a mesh with automatic axes.

    Raises:
        PlanError: the graph has a pipeline or branches on groups of devices, which no sharding states.
    """
    copies: dict[Value, Value] = {}
    origins = origins_of(graph)
    for node in graph.nodes:
        if node.kind in PARALLELIZATION:
            origin = origins[Value(node)]
            is_last = any(user.kind not in PARALLELIZATION for user, _ in graph.users[id(node)]) or Value(node) in graph.outputs
            copies[Value(node)] = _changed(node, origin, copies[origin], graph, mesh) if is_last else copies[origin]
            continue
        refuse_per_device(node)
        inside = None if node.inside is None else constrained(node.inside, mesh)
        operands = tuple(copies[v] for v in node.operands)
        copy = replace(node, operands=operands, inside=inside, types=((),) * len(node.tensors))
        for v, own in zip(node.results, copy.results, strict=True):
            is_origin = node.kind != "input" and inside is None and divides_more(node, v)
            copies[v] = _sharded(own, own_sharding(v, graph, mesh)) if is_origin else own
    return PCG(tuple(copies[Value(n)].node for n in graph.inputs), tuple(copies[v] for v in graph.outputs))


def origins_of(graph: PCG) -> dict[Value, Value]:
    """Return, for the result of every change of type, the value before that change and all changes before it."""
    origins: dict[Value, Value] = {}
    for node in graph.nodes:
        if node.kind in PARALLELIZATION:
            (v,) = node.operands
            origins[Value(node)] = origins.get(v, v)
    return origins


def refuse_per_device(node: Node) -> None:
    """Raise PlanError if devices run different operators at the same time in a node, which no sharding can state."""
    if node.kind in PER_DEVICE:
        raise PlanError(
            f"the plan has {node.kind} nodes, in which devices run different operators at a time, which no sharding constraints"
            " state: plan with pipelines=False, branches=False. (docs: plan#with-xlas-partitioner)"
        )


def open_spec(type_: Type, axes: Sequence[Axis], rank: int) -> PartitionSpec:
    """Return a type as a partition specification, open in dimensions that are partitioned at an inner digit."""
    dims: list[Any] = [()] * rank
    for state, axis in zip(type_, axes, strict=True):
        if state.kind == "P":
            is_open = state.outer > 1 or dims[state.dim] is PartitionSpec.UNCONSTRAINED
            dims[state.dim] = PartitionSpec.UNCONSTRAINED if is_open else (*dims[state.dim], axis.name)
    return PartitionSpec(*(d or None for d in dims))


def sharding_of(v: Value, axes: Sequence[Axis], mesh: Mesh) -> NamedSharding:
    """Return the sharding that a value's type states."""
    return NamedSharding(mesh, open_spec(v.type, axes, v.tensor.ndim))


def own_sharding(v: Value, graph: PCG, mesh: Mesh) -> Sharded:
    """Return the constraint of a value and of its cotangent to the value's type, named after the line that computes or uses it."""
    sharding = sharding_of(v, graph.axes, mesh)
    return Sharded(sharding, sharding, label(v.node, source_of_use(v.node, graph)))


def constrain(x: Any, sharded: Sharded) -> Any:
    """Constrain the shardings of a value and of its cotangent."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return _constrained(x, sharded)
    return _placed(x, sharded.forward, sharded)


def _placed(x: Any, sharding: NamedSharding, sharded: Sharded) -> Any:
    """Constrain the sharding of a value. The name scope is inside, because JAX leaves out scopes around a derivative rule."""
    with jax.named_scope(sharded.name):
        return lax.with_sharding_constraint(x, sharding)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _constrained(x: Any, sharded: Sharded) -> Any:
    return _placed(x, sharded.forward, sharded)


_constrained.defvjp(
    lambda x, sharded: (_placed(x, sharded.forward, sharded), None),
    lambda sharded, _, cotangent: (_placed(cotangent, sharded.backward, sharded),),
)


def divides_more(node: Node, v: Value) -> bool:
    """Return whether a result is partitioned along an axis that partitions no operand."""
    return any(s.kind == "P" and all(o.type[k].kind != "P" for o in node.operands) for k, s in enumerate(v.type))


def _changed(node: Node, origin: Value, copy: Value, graph: PCG, mesh: Mesh) -> Value:
    """Return the value after all changes of type up to `node`, with a constraint if its sharding changed or a sum was reduced."""
    before, after = origin.type, node.types[0]
    axes, rank = graph.axes, node.tensors[0].ndim
    is_reduced = PARTIAL in before
    if PARTIAL in after or (open_spec(before, axes, rank) == open_spec(after, axes, rank) and not is_reduced):
        return copy
    forward, backward = (NamedSharding(mesh, open_spec(t, axes, rank)) for t in (after, before))
    return _sharded(copy, Sharded(forward, backward, label(node, source_of_use(node, graph))), node.again)


def _sharded(v: Value, constraint: Sharded, again: Recompute = Recompute.NOTHING) -> Value:
    """Return a value with a constraint."""
    place = {"types": ((),), "source": v.node.source, "scope": v.node.scope}
    return Value(Node(SHARDED, (v,), (v.tensor,), payload=constraint, again=again, **place))
