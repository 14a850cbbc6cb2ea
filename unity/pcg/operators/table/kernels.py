"""Kernels (`unity.kernel`): the only operators whose factors are declared by their authors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec, get_abstract_mesh

from unity.pcg.jaxprs.jaxprs import floating
from unity.pcg.operators.kernel_primitive import KERNEL, Function, KernelDimensions, pulled_of, value_of
from unity.pcg.operators.layout import Layout
from unity.pcg.types.factors import Factor, Facts, Slot, Spec, operator
from unity.pcg.types.varying_axes import vary, varying


def kernel_pieces(operands: list[jax.Array], layout: Layout) -> list:
    """Call the function with a device's slices as its whole arguments. Outside a mesh, the kernel remains a primitive."""
    return unaware_of_mesh(layout.params["function"], operands) if get_abstract_mesh().manual_axes else layout.bind(*operands)


@operator(KERNEL, local=kernel_pieces, facts=Facts(alone=True, distinct=True))
def kernel(params: Any, operands: Any, results: Any) -> Spec:
    """Operands of a kernel. Each name along which it may be divided is a factor; results that lack a summed name are partial."""
    dimensions: KernelDimensions = params["dimensions"]
    sizes = dimensions.sizes([x.shape for x in (*operands, *results)], dimensions.sides)
    factors = (_factor(dimensions, name, sizes[name]) for name in (*dimensions.split, *dimensions.summed))
    return Spec(tuple(f for f in factors if f.size > 1), (), params["flops"])


def _factor(dimensions: KernelDimensions, name: str, size: int) -> Factor:
    """Return the factor of one name."""
    operands, results = (
        tuple(Slot(term.index(name)) if name in term else None for term in terms)
        for terms in (dimensions.operands, dimensions.results)
    )
    return Factor(name, size, operands, results, "sum" if name in dimensions.summed else "")


def unaware_of_mesh(function: Function, operands: list[jax.Array]) -> list:
    """Return the results of a function that each device calls as if there were no mesh.

    Inside a `shard_map`, the type of a value tells over which axes it varies. The results of kernels and of their derivative rules
    lack that. So their programs are traced outside the mesh and run with `check_vma=False`, and their results are declared to vary
    over all axes over which the operands do.
    """
    structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    axes = frozenset().union(*map(varying, operands))

    def run(program: Callable[[], core.ClosedJaxpr], *arguments: Any) -> list:
        def unchecked(*xs: Any) -> list:
            plain = [lax.squeeze(lax.expand_dims(x, (0,)), (0,)) for x in xs]  # removes the axes over which x varies from its type
            return core.jaxpr_as_fun(program())(*plain)

        results = jax.shard_map(unchecked, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(*arguments)
        return [vary(x, axes) for x in results]

    @jax.custom_vjp
    def call(*arguments: Any) -> list:
        return run(lambda: value_of(function, structs), *arguments)

    def forward(*arguments: Any) -> tuple[list, list]:
        out = run(lambda: pulled_of(function, structs).forward, *arguments)
        n = pulled_of(function, structs).results
        return out[:n], out[n:]

    def backward(residuals: list, cotangents: list) -> tuple:
        floats = [c for c in cotangents if c.dtype != jax.dtypes.float0]
        gradients = iter(run(lambda: pulled_of(function, structs).backward, *residuals, *floats))
        return tuple(next(gradients) if floating(s) else None for s in structs)

    call.defvjp(forward, backward)
    return call(*operands)
