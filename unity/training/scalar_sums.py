"""Fusion of the reductions of scalar sums over many arrays, such as a global norm, into one all-reduce of a scalar.

XLA reduces the sum of every sharded array separately, and in several steps if its dimensions are on different axes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from unity.exec.context import entry_axes

Specs = Mapping[Any, PartitionSpec]  # of variables


@dataclass(frozen=True)
class _Tree:
    """A tree of additions of scalars, some of which are sums of whole arrays. Inner results have no other user.

    Attributes:
        root: the last addition.
        inner: the sums and the other additions, by number.
        arrays: the arrays that are summed.
        scalars: the other terms.
    """

    root: int
    inner: frozenset[int]
    arrays: tuple[Any, ...]
    scalars: tuple[Any, ...]


def with_single_reductions(jaxpr: core.Jaxpr, specs: Specs, mesh: Mesh) -> core.Jaxpr:
    """Return a program in which each sum of sums has one all-reduce.

    Args:
        jaxpr: the program.
        specs: the specifications of the variables that are sharded along axes of the mesh.
        mesh: the mesh.
    """
    eqns = list(jaxpr.eqns)
    trees = {tree.root: tree for tree in _trees(jaxpr) if any(any(specs.get(v, ())) for v in tree.arrays)}
    removed = frozenset[int]().union(*(tree.inner for tree in trees.values()))
    replaced = [_summed(eqns[k], trees[k], specs, mesh) if k in trees else eqn for k, eqn in enumerate(eqns) if k not in removed]
    return jaxpr.replace(eqns=replaced)


def _trees(jaxpr: core.Jaxpr) -> list[_Tree]:
    """Return the largest trees of additions with sums of arrays among their terms."""
    producers = {v: k for k, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    reads = Counter(a for eqn in jaxpr.eqns for a in eqn.invars if not isinstance(a, core.Literal))
    reads.update(a for a in jaxpr.outvars if not isinstance(a, core.Literal))
    inside: set[int] = set()
    trees = []
    for k in reversed(range(len(jaxpr.eqns))):
        if k not in inside and (_adds(jaxpr.eqns[k]) or _sums(jaxpr.eqns[k])):
            trees.append(_tree(jaxpr, k, producers, reads))
            inside |= trees[-1].inner
    return trees


def _tree(jaxpr: core.Jaxpr, root: int, producers: Mapping[Any, int], reads: Mapping[Any, int]) -> _Tree:
    inner, arrays, scalars = set[int](), list[Any](), list[Any]()
    pending = [root]
    while pending:
        eqn = jaxpr.eqns[pending.pop()]
        if _sums(eqn):
            arrays.append(eqn.invars[0])
            continue
        for atom in eqn.invars:
            k = None if isinstance(atom, core.Literal) else producers.get(atom)
            if k is not None and reads[atom] == 1 and (_adds(jaxpr.eqns[k]) or _sums(jaxpr.eqns[k])):
                pending.append(k)
                inner.add(k)
            else:
                scalars.append(atom)
    return _Tree(root, frozenset(inner), tuple(arrays), tuple(scalars))


def _adds(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name in ("add", "add_any") and _is_scalar(eqn.outvars[0])


def _sums(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name == "reduce_sum" and _is_scalar(eqn.outvars[0]) and not isinstance(eqn.invars[0], core.Literal)


def _is_scalar(variable: Any) -> bool:
    return variable.aval.shape == ()


def _summed(eqn: core.JaxprEqn, tree: _Tree, specs: Specs, mesh: Mesh) -> core.JaxprEqn:
    """Return the equation of a tree's sum."""
    parts = tuple(specs.get(v, PartitionSpec()) for v in tree.arrays)
    run = jax.jit(_sum_of(parts, len(tree.scalars), mesh))
    operands = (*tree.arrays, *tree.scalars)
    (call,) = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in operands)).jaxpr.eqns
    return call.replace(invars=list(operands), outvars=eqn.outvars, source_info=eqn.source_info)


def _sum_of(parts: Sequence[PartitionSpec], scalars: int, mesh: Mesh) -> Callable[..., jax.Array]:
    """Return the sum of arrays that are sharded like `parts`, and of scalars. It is reduced once over the axes of all parts."""
    used = [frozenset(name for entry in spec for name in entry_axes(entry)) for spec in parts]
    axes = tuple(name for name in mesh.axis_names if any(name in names for names in used))

    def total(*values: jax.Array) -> jax.Array:
        arrays, rest = values[: len(parts)], values[len(parts) :]
        return sum(rest, lax.psum(sum(map(own_part, arrays, used)), axes))

    def own_part(x: jax.Array, names: frozenset[str]) -> jax.Array:
        """Return the sum of a device's piece, zero on all devices but one of those with equal pieces."""
        first = [lax.axis_index(name) == 0 for name in axes if name not in names]
        part = jnp.sum(x, dtype=x.dtype)
        return jnp.where(jnp.all(jnp.stack(first)), part, 0) if first else part

    return jax.shard_map(total, mesh=mesh, in_specs=(*parts, *(PartitionSpec(),) * scalars), out_specs=PartitionSpec())
