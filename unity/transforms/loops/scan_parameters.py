"""The parameters of a scan with other numbers of operands and results, as the installed version of JAX has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.jaxprs import SCANNED
from unity.pcg.jaxprs.trace_contexts import without_mesh


def with_step(params: Mapping[str, Any], step: Body, constants: int, carries: int) -> Mapping[str, Any]:
    """Return the parameters of a scan over another step.

    Other parameters than the step depend on the numbers of operands and results alone, so a scan over scalars has them.

    Args:
        params: the parameters of a scan.
        step: the step, whose inputs are constants, carries and slices.
        constants: the number of constants.
        carries: the number of carries.
    """
    length, slices = params["length"], len(step.inputs) - constants - carries

    def run(fixed: list[Any], carry: list[Any], stacks: list[Any]) -> Any:
        def one(carry: list[Any], _: list[Any]) -> tuple[list[Any], list[Any]]:
            total = sum(fixed, jnp.float32(0))  # a scan has only the constants that its step reads
            return [total] * carries, [total] * (len(step.outputs) - carries)

        return lax.scan(one, carry, stacks, length, reverse=params["reverse"], unroll=params["unroll"])

    scalar, stack = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((length,), jnp.float32)
    with without_mesh():
        program = jax.make_jaxpr(run)([scalar] * constants, [scalar] * carries, [stack] * slices)
    (traced,) = [e for e in program.eqns if e.primitive.name in SCANNED]
    return {**traced.params, "jaxpr": step}
