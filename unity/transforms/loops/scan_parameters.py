"""Scans with other numbers of operands and results, with the parameters that the installed version of JAX gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Atom, Body, tensor_type
from unity.pcg.jaxprs.jaxprs import SCANNED
from unity.pcg.jaxprs.trace_contexts import without_mesh
from unity.transforms.loops.dependences import ScanParts, variables_read


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


def add_emitting(
    writer: EquationWriter, parts: ScanParts, step: Body, carry: Sequence[int], results: Sequence[int], emitted: Sequence[int]
) -> dict[Atom, int]:
    """Append a scan that also returns some values of every step. Return the variables of these for all steps.

    Args:
        writer: the program around the scan.
        parts: the scan.
        step: the step, with the inputs of the scan's step and the outputs of `results`.
        carry: the inputs that it carries.
        results: the variables of the program for its outputs.
        emitted: the variables of the step that are returned, too.
    """
    scan, operands = parts.scan, dict(zip(parts.step.inputs, parts.scan.operands, strict=True))
    stacks: dict[Atom, int] = {
        v: writer.new(tensor_type((parts.length, *step.tensors[v].shape), step.tensors[v].dtype)) for v in emitted
    }
    rest = used(replace(step, outputs=(*step.outputs, *emitted)))
    read = variables_read(rest)
    fixed, slices = [v for v in parts.fixed if v in read], [v for v in parts.slices if v in read]
    program = Body((*fixed, *carry, *slices), rest.outputs, rest.equations, rest.tensors)
    params = with_step(scan.params, program, len(fixed), len(carry))
    atoms = tuple(operands[v] for v in program.inputs)
    writer.equations.append(replace(scan, params=params, operands=atoms, results=(*results, *stacks.values()), origin=None))
    return stacks
