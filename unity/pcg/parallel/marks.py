"""`unity.constrain`: a mark that constrains the sharding of a value inside of the user's function. To JAX it is the identity.

The mark is a JAX primitive, so that it survives tracing. Tangents and cotangents pass it unconstrained, a new batch dimension is
left open, and it lowers to no code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from unity.base.errors import ConstraintError
from unity.pcg.ir.graph import CONSTRAIN, PCG, Node
from unity.pcg.ir.nested_programs import has
from unity.pcg.parallel.sharding_spec import Entry, ShardingSpec, sharding_spec

_primitive = core.Primitive(CONSTRAIN)
_primitive.def_impl(lambda x, **params: x)
_primitive.def_abstract_eval(lambda x, **params: x)
ad.defjvp(_primitive, lambda tangent, x, **params: tangent)
ad.primitive_transposes[_primitive] = lambda cotangent, x, **params: [cotangent]  # pyright: ignore[reportArgumentType]
mlir.register_lowering(_primitive, lambda context, x, **params: [x])


def _batched(operands: Any, dims: Any, *, entries: tuple, **params: str) -> tuple[jax.Array, int]:
    (x,), (dim,) = operands, dims
    whole = (*entries, *((),) * (x.ndim - 1 - len(entries)))
    return _primitive.bind(x, entries=(*whole[:dim], None, *whole[dim:]), **params), dim


batching.primitive_batchers[_primitive] = _batched


def constrain(x: Any, spec: Any, *, mesh: Any = None) -> jax.Array:
    """Constrain the sharding of a value inside of a function: every plan of the function gives the value this sharding.

    Args:
        x: an array.
        spec: a `jax.sharding.PartitionSpec`. A name is a level of the machine ("node", "device"), an axis of `mesh`, or one of
            the user's mesh that is planned for; a number is a number of slices, over any axes; UNCONSTRAINED leaves a dimension
            open. Dimensions without an entry are whole.
        mesh: the names and sizes of the parts of a level ("device_a", "device_b"), if the specification has any: the mesh of
            the plan that printed it (`plan.mesh_shape`), or your own.

    Returns:
        The same value. Outside of a plan this is the identity.

    Raises:
        ConstraintError: the specification has more entries than the value has dimensions, or an entry of an unknown kind.
    """
    x, constraint = jnp.asarray(x), sharding_spec(spec, mesh)
    entries = constraint.entries
    if len(entries) > x.ndim:
        raise ConstraintError(f"{constraint} has {len(entries)} entries, but the value has {x.ndim} dimensions: {jax.typeof(x)}")
    return _primitive.bind(x, entries=entries)


def mark(entries: tuple[Entry, ...], stated: str) -> tuple[core.Primitive, dict[str, Any]]:
    """Return the primitive of `unity.constrain` and its parameters for the entries of a specification.

    Args:
        entries: the entries, in the names of the machine's axes.
        stated: the sharding as the user stated it, in the names of the user's mesh.
    """
    return _primitive, {"entries": entries, "stated": stated}


def mark_of(node: Node) -> ShardingSpec:
    """Return the specification of a `constrain` node of a captured graph."""
    assert node.body is not None, node
    return ShardingSpec(node.body.equations[0].params["entries"])


def stated_at(node: Node) -> str:
    """Return the sharding that a `constrain` node keeps, as the user stated it; "" if the user wrote `unity.constrain`."""
    assert node.body is not None, node
    return node.body.equations[0].params.get("stated", "")


def marks(graph: PCG) -> Iterator[Node]:
    """Iterate over the `constrain` nodes of a graph and of the graphs nested in it."""
    return (node for node, _ in graph.walk() if node.kind == CONSTRAIN)


def hidden(graph: PCG) -> Iterator[Node]:
    """Iterate over the operators with a `constrain` in their body, where no type can be chosen.

    Such operators are conditionals, while loops and calls with custom derivatives.
    """
    return (node for node, _ in graph.walk() if node.body is not None and node.kind != CONSTRAIN and has(node.body, CONSTRAIN))
