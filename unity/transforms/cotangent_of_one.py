"""Programs whose gradients are computed for a cotangent of one, and multiplied by the cotangent of the loss afterwards."""

from __future__ import annotations

from unity.pcg.ir.program import Body
from unity.pcg.parallel.stages import Mixed
from unity.pcg.propagation.cotangent_linearity import nonlinear_call
from unity.transforms.splice import operator_at


def check_cotangents(body: Body) -> None:
    """Raise Mixed, naming the call, if a program has a derivative rule that is not known to be linear in its cotangent."""
    call = nonlinear_call(body)
    if call is not None:
        raise Mixed(
            f"{operator_at(call)} has a derivative rule that is not known to be linear in its cotangent, as one that clips, and"
            " gradients of micro-batches are multiplied by the cotangent of the loss afterwards"
        )
