"""The program that one device runs for an operator, forward and backward, traced for a mesh without devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from unity.pcg.ir.program import Body, Literal, Tensor
from unity.pcg.jaxprs.trace_contexts import precision_of
from unity.pcg.local.interpreter import is_key, run_body, varied
from unity.pcg.operators.layout import PlacedTensor
from unity.pcg.propagation.nested.derivative_rules import as_function
from unity.pcg.propagation.solver import dual
from unity.pcg.types.accumulation import storage_dtype
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, Type, local_shape
from unity.pcg.types.varying_axes import vary

Types = Sequence[Type]
Function = Callable[..., list]


def dual_type(type_: Type) -> Type:
    """Return the type of a cotangent."""
    return tuple(map(dual, type_))


def floating_positions(body: Body) -> tuple[list[int], list[int]]:
    """Return the positions of the operands and of the results that have gradients."""
    operands = [k for k, v in enumerate(body.inputs) if body.tensors[v].floating]
    return operands, [k for k, a in enumerate(body.outputs) if body.tensor(a).floating]


def pullback(body: Body, run: Function) -> Function:
    """Return the function (operands, cotangents of floating results) → gradients of floating operands."""
    operands, results = floating_positions(body)

    def gradients(*arguments: Any) -> list:
        primals, cotangents = arguments[: len(body.inputs)], arguments[len(body.inputs) :]

        def differentiable(*floating: Any) -> list:
            replaced = dict(zip(operands, floating, strict=True))
            out = run(*(replaced.get(k, x) for k, x in enumerate(primals)))
            return [out[k] for k in results]

        return list(jax.vjp(differentiable, *(primals[k] for k in operands))[1](list(cotangents)))

    return gradients


def whole_function(body: Body) -> Function:
    """Return a body as a function of whole tensors, equation by equation."""

    def run(*operands: Any) -> list:
        env = dict(zip(body.inputs, operands, strict=True))

        def read(atom: Any) -> Any:
            if not isinstance(atom, Literal):
                return env[atom]
            return atom.value if is_key(atom) else jnp.asarray(atom.value, atom.tensor.dtype)

        for e in body.equations:
            env.update(zip(e.results, as_function(e)(*map(read, e.operands)), strict=True))
        return [read(a) for a in body.outputs]

    return run


def varying_names(type_: Type, axes: tuple[Axis, ...]) -> tuple[str, ...]:
    """Return the names of the axes along which devices may hold different pieces."""
    return tuple(a.name for a, s in zip(axes, type_, strict=True) if s != UNUSED)


def local_function(body: Body, operands: Types, results: Types, axes: tuple[Axis, ...]) -> Function:
    """Return a body as a function of one device's pieces, with the interpreter by which plans run."""

    def run(*pieces: Any) -> list:
        outputs = run_body(body, pieces, operands, results, axes)
        placed = (
            PlacedTensor(t.shape, t.dtype, type_, axes) for t, type_ in zip(map(body.tensor, body.outputs), results, strict=True)
        )
        return varied([jnp.asarray(x) for x in outputs], list(placed))

    return run


def traced(body: Body, run: Function, tensors: Sequence[Tensor]) -> core.ClosedJaxpr:
    """Trace a function of whole tensors."""
    with precision_of(body.tensors.values()):
        return jax.make_jaxpr(run)(*(t.struct for t in tensors))


def traced_locally(
    body: Body, run: Function, tensors: Sequence[Tensor], operands: Types, results: Types, axes: tuple[Axis, ...]
) -> core.ClosedJaxpr:
    """Trace a function of pieces as the program of one device.

    Its operands and results are `[1, *piece]`, in the dtypes in which devices hold them.
    """

    def local(*pieces: Any) -> tuple:
        outputs = run(*(x[0] for x in pieces))
        return tuple(vary(x, varying_names(t, axes))[None] for x, t in zip(outputs, results, strict=True))

    sizes = {a.name: a.size for a in axes}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(axes))
    in_specs, out_specs = (tuple(PartitionSpec(varying_names(t, axes)) for t in ts) for ts in (operands, results))
    stacked = []
    for tensor, t in zip(tensors, operands, strict=True):
        devices = prod(sizes[name] for name in varying_names(t, axes))
        stacked.append(jax.ShapeDtypeStruct((devices, *local_shape(tensor.shape, t, axes)), storage_dtype(tensor.dtype, t, axes)))
    with precision_of(body.tensors.values()):
        return _shard_map_body(jax.make_jaxpr(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs))(*stacked))


def _shard_map_body(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return the program inside the only `shard_map`. Constants of the program around it become its own."""
    (eqn,) = (e for e in program.jaxpr.eqns if e.primitive.name == "shard_map")
    consts = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    inner = eqn.params["jaxpr"]
    pairs = list(zip(inner.invars, eqn.invars, strict=True))
    fixed = {v: consts[a] for v, a in pairs if isinstance(a, core.Var) and a in consts}
    unnamed = core.DebugInfo("local", "", None, None)
    free = [v for v in inner.invars if v not in fixed]
    jaxpr = core.Jaxpr([*inner.constvars, *fixed], free, inner.outvars, inner.eqns, inner.effects, unnamed)
    return core.ClosedJaxpr(jaxpr, list(fixed.values()))
