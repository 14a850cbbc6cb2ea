"""`unity.constrain`: a value in the user's function whose sharding is given. For JAX it is the value itself.

It is a primitive of its own, so that a program keeps it wherever it is traced. Tangents and cotangents pass it unmarked, a new
batch dimension may lie anywhere, and compiled it is nothing.
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
from unity.pcg.parallel.wanted_types import Wanted, wanted

_primitive = core.Primitive(CONSTRAIN)
_primitive.def_impl(lambda x, *, entries: x)
_primitive.def_abstract_eval(lambda x, *, entries: x)
ad.defjvp(_primitive, lambda tangent, x, *, entries: tangent)
ad.primitive_transposes[_primitive] = lambda cotangent, x, *, entries: [cotangent]  # pyright: ignore[reportArgumentType]
mlir.register_lowering(_primitive, lambda context, x, *, entries: [x])


def _batched(operands: Any, dims: Any, *, entries: tuple) -> tuple[jax.Array, int]:
    (x,), (dim,) = operands, dims
    whole = (*entries, *((),) * (x.ndim - 1 - len(entries)))
    return _primitive.bind(x, entries=(*whole[:dim], None, *whole[dim:])), dim


batching.primitive_batchers[_primitive] = _batched


def constrain(x: Any, spec: Any) -> jax.Array:
    """Gives a value's sharding inside of a function: whatever plan is made of the function, this value has this type.

    Args:
        x: an array.
        spec: a `jax.sharding.PartitionSpec`. A name is a level of the machine ("node", "device") or one of its mesh axes
            ("d0"); a number is so many slices over whatever axes; UNCONSTRAINED leaves a dimension open. Dimensions that are
            not mentioned are whole.

    Returns:
        The same value. Outside of a plan nothing else happens.

    Raises:
        ConstraintError: the specification has more entries than the value has dimensions, or says nothing that is known.
    """
    x, asked = jnp.asarray(x), wanted(spec)
    if len(asked.entries) > x.ndim:
        raise ConstraintError(f"{asked} has {len(asked.entries)} entries, but the value has {x.ndim} dimensions: {jax.typeof(x)}")
    return _primitive.bind(x, entries=asked.entries)


def mark_of(node: Node) -> Wanted:
    """What a node of this kind in a captured graph wants of its value."""
    assert node.body is not None, node
    return Wanted(node.body.equations[0].params["entries"])


def marks(graph: PCG) -> Iterator[Node]:
    """The marked values of a graph, those inside of scans and remats too."""
    return (node for node, _ in graph.walk() if node.kind == CONSTRAIN)


def hidden(graph: PCG) -> Iterator[Node]:
    """Operators with a marked value inside, where no type can be chosen: a branch, a while loop, a custom derivative."""
    return (node for node, _ in graph.walk() if node.body is not None and node.kind != CONSTRAIN and has(node.body, CONSTRAIN))
