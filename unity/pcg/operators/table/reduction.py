"""Reductions, arg-reductions, cumulative operators, sort and top-k."""

from __future__ import annotations

from math import prod
from typing import Any

from unity.pcg.operators.table.elementwise import every_dimension
from unity.pcg.types.factors import (
    NONE,
    NOTHING,
    OPERANDS_AND_RESULT,
    Factor,
    Facts,
    Reads,
    Slot,
    Spec,
    at,
    operator,
)

REDUCES, ALONE = Facts(reads_buffers=True), Facts(alone=True)
REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_or": "or", "reduce_and": "and"}
GENERAL_REDUCTION = "reduce"  # by any function
WHOLE_REDUCTIONS = ("reduce_prod", "reduce_xor")  # whose reduced dimensions are not divided


def reduction(kind: str) -> Any:
    """Return the specification of a reduction over `axes`: reduced dimensions are reduction factors if `kind` combines pieces.

    Devices combine booleans by "or" and "and", but not the bits of integers.
    """

    def spec(params: Any, operands: Any, results: Any) -> Spec:
        shape, axes = operands[0].shape, params["axes"]
        rest = [i for i in range(len(shape)) if i not in axes]
        factors = [Factor(f"d{i}", shape[i], (Slot(i),), (Slot(k),) * len(results)) for k, i in enumerate(rest) if shape[i] > 1]
        if kind and (kind not in ("or", "and") or operands[0].dtype == bool):
            factors += [Factor(f"r{i}", shape[i], (Slot(i),), (None,), kind) for i in axes if shape[i] > 1]
        return Spec(tuple(factors), (frozenset({0}),) if kind == "sum" else (), prod(shape))

    return spec


EXTREMUM = Facts(OPERANDS_AND_RESULT, reads_buffers=True)
for _name, _kind in REDUCTIONS.items():
    operator(_name, facts=EXTREMUM if _kind in ("max", "min") else REDUCES)(reduction(_kind))
operator(*WHOLE_REDUCTIONS, facts=REDUCES)(reduction(""))
operator("argmax", "argmin", facts=Facts(NOTHING, alone=True, extends=True))(reduction(""))


@operator(GENERAL_REDUCTION, facts=REDUCES)
def general_reduction(params: Any, operands: Any, results: Any) -> Spec:
    """Operands and their scalar initial values, reduced by any function. Reduced dimensions are blocked."""
    rest = [i for i in range(operands[0].ndim) if i not in params["dimensions"]]
    n = len(results)
    factors = (Factor(f"d{i}", operands[0].shape[i], (Slot(i),) * n + (None,) * n, (Slot(k),) * n) for k, i in enumerate(rest))
    return Spec(tuple(f for f in factors if f.size > 1), (), prod(operands[0].shape))


def along_one(parameter: str, linear: bool = False) -> Any:
    """Return the specification of an operator along one dimension, which is blocked, and which a parameter names."""

    def spec(params: Any, operands: Any, results: Any) -> Spec:
        blocked = params[parameter] % operands[0].ndim
        factors = every_dimension([o.shape for o in operands], operands[0].shape, len(results), skip=(blocked,))
        return Spec(factors, (frozenset({0}),) if linear else (), prod(operands[0].shape))

    return spec


operator("cumsum", facts=Facts(reads_buffers=True, alone=True, extends=True))(along_one("axis", linear=True))
operator("cumprod", "cummax", "cummin", "cumlogsumexp", facts=ALONE)(along_one("axis"))
operator("sort", facts=Facts(alone=True, extends=True))(along_one("dimension"))


@operator("top_k", "approx_top_k", facts=Facts((Reads(NONE, at(1)),), alone=True))
def top_k(params: Any, operands: Any, results: Any) -> Spec:
    """One operand. The dimension whose largest elements are selected is blocked."""
    blocked = params.get("axis", params.get("reduction_dimension", -1)) % operands[0].ndim
    return Spec(every_dimension([operands[0].shape], operands[0].shape, 2, skip=(blocked,)), (), prod(operands[0].shape))
