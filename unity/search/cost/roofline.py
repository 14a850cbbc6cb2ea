"""The roofline: a lower bound on an operator's time, from its arithmetic and its memory traffic (Williams et al. 2009)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from unity.machine.hardware import Device
from unity.pcg.capture.heavy_operators import is_fused_product
from unity.pcg.ir.program import Body
from unity.pcg.operators.kernel_primitive import KERNEL
from unity.pcg.propagation.nested.programs import nested_body, nests
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


@dataclass(frozen=True)
class Access:
    """The part of an operand or a result that a body reads or writes.

    XLA fuses a slice with its user and adds the slice's gradient in place, so neither traverses the whole operand. Likewise it
    reads of a table only the rows that are looked up; but the table's gradient is first zeroed, then rows are added in place. Where
    the body traverses the table as well, as a cross-entropy does its logits, rows are added in place to the gradient of that.

    Args:
        traversed: The fraction that is read wherever the operator runs, at most 1.
        selected: The fraction that indices select (`Spec.selects`). Devices that share the work share it, even of a whole table. It
            exceeds 1 where rows are read several times; a device reads its piece once, and then from a cache.
    """

    traversed: float = 1.0
    selected: float = 0.0


@lru_cache(maxsize=65536)
def accesses(body: Body) -> tuple[Access, ...]:
    """Return the access to each operand, then to each result, of a body."""
    traversed, selected = dict.fromkeys(body.inputs, 0.0), dict.fromkeys(body.inputs, 0.0)
    for e in body.equations:
        spec = spec_of(body, e)
        for position, a in enumerate(e.operands):
            if isinstance(a, int) and a in traversed:
                if spec is None or position > 0:
                    traversed[a] += 1.0
                else:
                    (selected if spec.selects else traversed)[a] += spec.reads
    traversed |= {a: 1.0 for a in body.outputs if isinstance(a, int) and a in traversed}
    return (*(Access(min(part, 1.0), selected[v]) for v, part in traversed.items()), *(Access() for _ in body.outputs))


def local_traffic(
    body: Body, pieces: Iterable[Array | float], share: Array | float, differentiated: Sequence[bool]
) -> tuple[Array | float, Array | float]:
    """Return the memory traffic of a body on one device: bytes read or written, and bytes of gradients that are zeroed.

    Args:
        body: The operator's program.
        pieces: Bytes of each operand, then of each result, on one device.
        share: The fraction of the work that the device does.
        differentiated: For each operand, whether it has a gradient.
    """
    touched: Array | float = 0.0
    zeroed: Array | float = 0.0
    atoms = (*body.inputs, *body.outputs)
    gradients = (*differentiated, *(False for _ in body.outputs))
    for atom, nbytes, access, has_gradient in zip(atoms, pieces, accesses(body), gradients, strict=True):
        if not access.selected:
            touched = touched + nbytes * access.traversed
            continue
        selected = access.selected * np.minimum(nbytes, body.tensor(atom).nbytes * share)
        touched = touched + np.minimum(nbytes, nbytes * access.traversed + selected)
        zeroed = zeroed + nbytes * (1 - access.traversed) if has_gradient else zeroed
    return touched, zeroed


def roofline(
    device: Device,
    work: Array | float,
    dtype: str,
    touched: Array | float,
    differentiated: int,
    launched: bool = True,
    slowdown: tuple[Array | float, Array | float] = (1.0, 1.0),
    zeroed: Array | float = 0.0,
) -> tuple[Array, Array]:
    """Return the seconds forward and backward of an operator on one device.

    The larger of arithmetic and memory traffic takes the time. Backward, a product is one more product for each of its two
    operands that has a gradient, and traffic doubles: cotangents are read and written beside the operands. Gradients of tables are
    zeroed besides.

    Args:
        device: The device.
        work: FLOPs.
        dtype: The dtype of the arithmetic.
        touched: Bytes read or written.
        differentiated: The number of operands with a gradient.
        launched: Whether the operator is launched as a kernel; one without equations is not.
        slowdown: How many times as long the arithmetic takes, forward and backward.
        zeroed: Bytes of gradients that are zeroed.
    """
    compute = work / (device.flops_of(dtype) * device.efficiency)
    traffic = touched / device.bandwidth
    launch = device.launch if launched else 0.0
    forward = np.maximum(compute * slowdown[0], traffic) + launch
    if not differentiated:
        return forward, np.zeros_like(forward)
    return forward, np.maximum(compute * slowdown[1] * min(differentiated, 2), 2 * traffic + zeroed / device.bandwidth) + launch
