"""One interpreter of jaxprs: over any domain of elements, on all devices at once, for many candidates at once.

Arrays are stacked, `[*devices, *batch, *local]`: one leading dimension for each mesh axis, then any number of batch dimensions.
Collectives move along the first, everything else works on the last. The programs are local ones, as they run inside
`shard_map`, so what is interpreted is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.extend import core

from unity.pcg.types.axis import Axis
from unity.verify.semantics.domains import Array, Domain
from unity.verify.semantics.primitives import NotInterpreted, Run, Value, evaluate
from unity.verify.semantics.primitives.core import is_element

__all__ = ["NotInterpreted", "interpret", "interpret_values"]


def interpret(
    program: core.ClosedJaxpr, operands: Sequence[Array], domain: Domain, axes: tuple[Axis, ...], batch: int = 0
) -> list[Array]:
    """The results of a local program on all devices, stacked as its operands are: `[*devices, *batch, *local]`.

    Floating operands are arrays of the domain's elements, and so are PRNG keys; others are concrete. A leading dimension of
    size one means the same for all. Raises NotInterpreted for a primitive, or a use of one, that has no meaning here.
    """
    values = [Value(np.asarray(x), not is_element(aval.dtype)) for x, aval in zip(operands, program.in_avals, strict=True)]
    return [v.array for v in interpret_values(program, values, domain, axes, batch)]


def interpret_values(
    program: core.ClosedJaxpr, operands: Sequence[Value], domain: Domain, axes: tuple[Axis, ...], batch: int = 0
) -> list[Value]:
    """The same, of values that say whether they are concrete; integers made from floating elements are not."""
    run = Run(domain, axes, len(axes) + batch)
    batches = [v.array.shape[len(axes) : run.lead] for v in operands]
    lead = tuple(axis.size for axis in axes) + np.broadcast_shapes(*batches, (1,) * batch)
    found = evaluate(run, program, operands)
    return [Value(np.broadcast_to(v.array, lead + run.shape(v.array)), v.known) for v in found]
