"""Local programs as they will run: traced on one device's pieces, inside a `shard_map`, without any device."""

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
from unity.pcg.jaxprs.mesh_context import apart
from unity.pcg.jaxprs.weak_types import is_weak
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, local_shape

T = TypeVar("T")


def inside(axes: Sequence[Axis], wide: bool, run: Callable[[], T]) -> T:
    """What `run` gives where values are one device's pieces; `wide`: in 64 bits."""
    names, sizes = tuple(a.name for a in axes) or ("d0",), tuple(a.size for a in axes) or (1,)
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    found: list[T] = []

    def local() -> tuple:
        found.append(run())
        return ()

    with jax.enable_x64(True) if wide else nullcontext(), apart():
        jax.make_jaxpr(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=()))()
    return found[0]


def piece(v: Value, axes: Sequence[Axis]) -> jax.ShapeDtypeStruct:
    """One device's piece of a value: its shape, and the axes along which it differs."""
    varying = frozenset(a.name for a, s in zip(axes, v.type, strict=True) if s != UNUSED)
    return _struct(local_shape(v.tensor.shape, v.type, axes), v.tensor.dtype, ManualAxisType(varying=varying))


def like(aval: Any) -> jax.ShapeDtypeStruct:
    """A piece like another."""
    return _struct(aval.shape, aval.dtype, aval.manual_axis_type)


def _struct(shape: Sequence[int], dtype: Any, varying: ManualAxisType) -> jax.ShapeDtypeStruct:
    here = NamedSharding(get_abstract_mesh(), PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=here, manual_axis_type=varying)


@dataclass(frozen=True, eq=False)
class Program:
    """A local program, and the axes along which each of its operands differs."""

    body: Body
    varying: tuple[frozenset[str], ...]
    weak: tuple[bool, ...] = ()  # which of its results are weakly typed, if it was traced

    @property
    def pieces(self) -> list[jax.ShapeDtypeStruct]:
        """Operands to trace it with."""
        tensors = [self.body.tensors[v] for v in self.body.inputs]
        pairs = zip(tensors, self.varying, strict=True)
        return [_struct(t.shape, t.dtype, ManualAxisType(varying=names)) for t, names in pairs]


def traced(run: Callable[..., Any], pieces: Sequence[jax.ShapeDtypeStruct], rule: bool = False) -> Program:
    """A local program, or that of a derivative rule; to be called inside."""
    made = jax.make_jaxpr(run)(*pieces)
    body = used(close(first_order(made) if rule else made))
    varying = tuple(frozenset(p.manual_axis_type.varying) for p in pieces)
    return Program(body, varying, tuple(map(is_weak, made.out_avals)))


def closed(jaxpr: core.ClosedJaxpr) -> Program:
    """A program inside of a local program."""
    return Program(close(jaxpr), varying_of(jaxpr.jaxpr.invars))


def varying_of(variables: Sequence[Any]) -> tuple[frozenset[str], ...]:
    """The axes along which variables differ."""
    return tuple(frozenset(v.aval.manual_axis_type.varying) for v in variables)


def local_program(graph: PCG) -> Program:
    """A graph's local program."""
    pieces = [piece(Value(n), graph.axes) for n in graph.inputs]
    return traced(lambda *given: run_graph(graph, given), pieces)
