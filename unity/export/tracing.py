"""Tracing of local programs as they will run: on the pieces of one device, inside a `shard_map`, without devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, ManualAxisType, NamedSharding, PartitionSpec, get_abstract_mesh

from unity.exec.lowering import run_graph
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.graph import PCG, Value
from unity.pcg.ir.program import Body, close
from unity.pcg.jaxprs.foreign_primitives import first_order
from unity.pcg.jaxprs.trace_contexts import default_promotion, without_mesh
from unity.pcg.jaxprs.weak_types import is_weak
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, local_shape

T = TypeVar("T")


def within_mesh(axes: Sequence[Axis], wide: bool, run: Callable[[], T]) -> T:
    """Return what a function returns when it is called inside a `shard_map`, where values are one device's pieces.

    Args:
        axes: the mesh axes.
        wide: whether 64-bit types are enabled.
        run: the function.
    """
    names, sizes = tuple(a.name for a in axes) or ("device",), tuple(a.size for a in axes) or (1,)
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    results: list[T] = []

    def local() -> tuple:
        results.append(run())
        return ()

    with jax.enable_x64(True) if wide else nullcontext(), without_mesh(), default_promotion():
        jax.make_jaxpr(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=()))()
    return results[0]


def piece(v: Value, axes: Sequence[Axis]) -> jax.ShapeDtypeStruct:
    """Return one device's piece of a value, as a shape with the mesh axes along which devices differ."""
    varying = frozenset(a.name for a, s in zip(axes, v.type, strict=True) if s != UNUSED)
    return _piece_struct(local_shape(v.tensor.shape, v.type, axes), v.tensor.dtype, ManualAxisType(varying=varying))


def like(aval: Any) -> jax.ShapeDtypeStruct:
    """Return a piece with the shape, dtype and varying axes of an abstract value."""
    return _piece_struct(aval.shape, aval.dtype, aval.manual_axis_type)


def _piece_struct(shape: Sequence[int], dtype: Any, varying: ManualAxisType) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(get_abstract_mesh(), PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=varying)


@dataclass(frozen=True, eq=False)
class LocalProgram:
    """A local program, the mesh axes along which each operand varies, and which results are weakly typed, if it was traced."""

    body: Body
    varying: tuple[frozenset[str], ...]
    weak: tuple[bool, ...] = ()

    @property
    def pieces(self) -> list[jax.ShapeDtypeStruct]:
        """The operands to trace the program with."""
        tensors = [self.body.tensors[v] for v in self.body.inputs]
        pairs = zip(tensors, self.varying, strict=True)
        return [_piece_struct(t.shape, t.dtype, ManualAxisType(varying=names)) for t, names in pairs]


def traced(run: Callable[..., Any], pieces: Sequence[jax.ShapeDtypeStruct], rule: bool = False) -> LocalProgram:
    """Return the local program of a function, or of a derivative rule. Must be called inside `within_mesh`."""
    jaxpr = jax.make_jaxpr(run)(*pieces)
    body = used(close(first_order(jaxpr) if rule else jaxpr))
    varying = tuple(frozenset(p.manual_axis_type.varying) for p in pieces)
    return LocalProgram(body, varying, tuple(map(is_weak, jaxpr.out_avals)))


def closed(jaxpr: core.ClosedJaxpr) -> LocalProgram:
    """Return a program that is nested in a local program."""
    return LocalProgram(close(jaxpr), varying_of(jaxpr.jaxpr.invars))


def varying_of(variables: Sequence[Any]) -> tuple[frozenset[str], ...]:
    """Return the mesh axes along which each of some variables varies."""
    return tuple(frozenset(v.aval.manual_axis_type.varying) for v in variables)


def local_program(graph: PCG) -> LocalProgram:
    """Return a graph's local program."""
    pieces = [piece(Value(n), graph.axes) for n in graph.inputs]
    return traced(lambda *operands: run_graph(graph, operands), pieces)
