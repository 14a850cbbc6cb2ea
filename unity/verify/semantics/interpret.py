"""One interpreter of jaxprs: over any domain of elements, on all devices at once, for many candidates at once.

Arrays are stacked, `[*devices, *batch, *local]`: one leading dimension for each mesh axis, then any number of batch dimensions.
Collectives move elements along the device dimensions, everything else works on the local ones. The programs are the local ones
that run inside `shard_map`, so what is interpreted is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.extend import core

from unity.pcg.types.axis import Axis
from unity.verify.semantics.domains import Array, ElementDomain
from unity.verify.semantics.primitives import InterpreterRun, NotInterpreted, StackedValue, evaluate
from unity.verify.semantics.primitives.core import is_element

__all__ = ["NotInterpreted", "interpret", "interpret_values"]


def interpret(
    program: core.ClosedJaxpr, operands: Sequence[Array], domain: ElementDomain, axes: tuple[Axis, ...], batch: int = 0
) -> list[Array]:
    """Return the results of a local program on all devices, stacked as its operands are.

    Args:
        program: of one device.
        operands: `[*devices, *batch, *local]`. Floating ones, and PRNG keys, are arrays of the domain's elements; others are
            concrete. A leading dimension of size one means the same for all.
        domain: of the elements.
        axes: of the mesh.
        batch: the number of batch dimensions.

    Raises:
        NotInterpreted: for a primitive, or a use of one, that has no meaning here.
    """
    pairs = zip(operands, program.in_avals, strict=True)
    values = [StackedValue(np.asarray(x), not is_element(aval.dtype)) for x, aval in pairs]
    return [v.array for v in interpret_values(program, values, domain, axes, batch)]


def interpret_values(
    program: core.ClosedJaxpr, operands: Sequence[StackedValue], domain: ElementDomain, axes: tuple[Axis, ...], batch: int = 0
) -> list[StackedValue]:
    """Interpret a program on values that are marked as concrete or not.

    See `interpret`. Integers computed from floating elements are elements themselves.
    """
    run = InterpreterRun(domain, axes, len(axes) + batch)
    batches = [v.array.shape[len(axes) : run.lead] for v in operands]
    lead = tuple(axis.size for axis in axes) + np.broadcast_shapes(*batches, (1,) * batch)
    results = evaluate(run, program, operands)
    return [StackedValue(np.broadcast_to(v.array, lead + run.shape(v.array)), v.known) for v in results]
