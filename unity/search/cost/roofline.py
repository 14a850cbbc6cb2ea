"""The roofline: a lower bound on an operator's time, from its arithmetic and its memory traffic (Williams et al. 2009)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from unity.machine.hardware import Device
from unity.pcg.capture.heavy_operators import is_fused_product
from unity.pcg.ir.program import Body
from unity.pcg.operators.kernel_primitive import KERNEL
from unity.pcg.propagation.solver import nested_body, nests
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import facts_of

Array = np.ndarray


@lru_cache(maxsize=65536)
def dense_work(body: Body) -> tuple[float, str]:
    """Return the FLOPs of matrix products, convolutions and kernels in a body, and their dtype."""
    total, dtype = 0.0, "float32"
    for e in body.equations:
        if (facts_of(e.name).product and not is_fused_product(body, e)) or e.name == KERNEL:
            spec = spec_of(body, e)
            total += spec.flops if spec else 0.0
            dtype = str(body.tensor(e.operands[0]).dtype)
        elif nests(e):
            inner, inner_dtype = dense_work(nested_body(e))
            total += inner * int(e.params.get("length", 1))
            dtype = inner_dtype if inner else dtype
    return total, dtype


@lru_cache(maxsize=65536)
def touches(body: Body) -> tuple[float, ...]:
    """Return the fraction of each operand, then of each result, that a body reads or writes.

    It is less than 1 for an operand of which the body reads only slices: XLA fuses a slice with its user and adds the slice's
    gradient in place, so neither traverses the whole operand.
    """
    parts = dict.fromkeys(body.inputs, 0.0)
    for e in body.equations:
        spec = spec_of(body, e)
        for position, a in enumerate(e.operands):
            if isinstance(a, int) and a in parts:
                parts[a] += spec.reads if spec is not None and position == 0 else 1.0
    parts |= {a: 1.0 for a in body.outputs if isinstance(a, int) and a in parts}
    return (*(min(part, 1.0) for part in parts.values()), *(1.0 for _ in body.outputs))


def roofline(
    device: Device,
    work: Array | float,
    dtype: str,
    touched: Array | float,
    differentiated: int,
    launched: bool = True,
    slowdown: tuple[Array | float, Array | float] = (1.0, 1.0),
) -> tuple[Array, Array]:
    """Return the seconds forward and backward of an operator on one device.

    The larger of arithmetic and memory traffic takes the time. Backward, a product is one more product for each of its two
    operands that has a gradient, and traffic doubles: cotangents are read and written beside the operands.

    Args:
        device: The device.
        work: FLOPs.
        dtype: The dtype of the arithmetic.
        touched: Bytes read or written.
        differentiated: The number of operands with a gradient.
        launched: Whether the operator is launched as a kernel; one without equations is not.
        slowdown: How many times as long the arithmetic takes, forward and backward.
    """
    compute = work / (device.flops_of(dtype) * device.efficiency)
    traffic = touched / device.bandwidth
    launch = device.launch if launched else 0.0
    forward = np.maximum(compute * slowdown[0], traffic) + launch
    if not differentiated:
        return forward, np.zeros_like(forward)
    return forward, np.maximum(compute * slowdown[1] * min(differentiated, 2), 2 * traffic) + launch
