"""What the authors of kernels say of them (`unity.kernel`): the only factors that are told rather than known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec, get_abstract_mesh

from unity.pcg.jaxprs.jaxprs import floating
from unity.pcg.operators.kernel_primitive import KERNEL, Dimensions, Function, pulled_of, value_of
from unity.pcg.operators.layout import Layout
from unity.pcg.types.factors import Factor, Facts, Slot, Spec, operator
from unity.pcg.types.varying_axes import vary, varying


def kernel_pieces(operands: list[jax.Array], layout: Layout) -> list:
    """The function, called with a device's slices as if these were all there is. Outside of a mesh the kernel stays what it is."""
    return alone(layout.params["function"], operands) if get_abstract_mesh().manual_axes else layout.bind(*operands)


@operator(KERNEL, local=kernel_pieces, facts=Facts(alone=True, distinct=True))
def kernel(params: Any, operands: Any, results: Any) -> Spec:
    """A factor for each name along which it may be divided; results that lack a name are sums over its slices."""
    said: Dimensions = params["dimensions"]
    sizes = said.sizes([x.shape for x in (*operands, *results)], said.sides)
    factors = (_factor(said, name, sizes[name]) for name in (*said.split, *said.summed))
    return Spec(tuple(f for f in factors if f.size > 1), (), params["flops"])


def _factor(said: Dimensions, name: str, size: int) -> Factor:
    operands, results = (
        tuple(Slot(term.index(name)) if name in term else None for term in terms) for terms in (said.operands, said.results)
    )
    return Factor(name, size, operands, results, "sum" if name in said.summed else "")


def alone(function: Function, operands: list[jax.Array]) -> list:
    """The results of a function that knows nothing of a mesh, on each device for itself.

    Inside of a `shard_map` the types of values say along which axes they differ. What kernels make, and their derivative rules,
    do not say so. So they are read outside of the mesh and run where nobody asks, and what they give is said to differ as the
    operands do.
    """
    structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    differ = frozenset().union(*map(varying, operands))

    def run(program: Callable[[], core.ClosedJaxpr], *given: Any) -> list:
        def unasked(*xs: Any) -> list:
            plain = [lax.squeeze(lax.expand_dims(x, (0,)), (0,)) for x in xs]  # no type says any more along which axes it differs
            return core.jaxpr_as_fun(program())(*plain)

        found = jax.shard_map(unasked, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(*given)
        return [vary(x, differ) for x in found]

    @jax.custom_vjp
    def call(*given: Any) -> list:
        return run(lambda: value_of(function, structs), *given)

    def forward(*given: Any) -> tuple[list, list]:
        out = run(lambda: pulled_of(function, structs).forward, *given)
        n = pulled_of(function, structs).results
        return out[:n], out[n:]

    def backward(kept: list, cotangents: list) -> tuple:
        given = [c for c in cotangents if c.dtype != jax.dtypes.float0]
        found = iter(run(lambda: pulled_of(function, structs).backward, *kept, *given))
        return tuple(next(found) if floating(s) else None for s in structs)

    call.defvjp(forward, backward)
    return call(*operands)
