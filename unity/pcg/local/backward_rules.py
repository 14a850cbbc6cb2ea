"""The backward rule of a `custom_vjp` on pieces, for the results that have cotangents when it runs.

With `symbolic_zeros`, a rule may ask which results have a cotangent, and return another derivative where one has none. It is
planned as if all had one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0
from jax.extend import core

from unity.base.errors import CaptureError
from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.jaxprs import chosen_of
from unity.pcg.local.forward_rules import has_results
from unity.pcg.operators.layout import PlacedTensor
from unity.pcg.propagation.nested.derivative_rules import (
    Unreadable,
    VjpRule,
    backward_body,
    backward_calls,
    differentiable_operands,
    pull,
)
from unity.pcg.propagation.placement import Placing, placing
from unity.pcg.propagation.propagation import Unmatched
from unity.pcg.types.parallel_type import UNUSED
from unity.pcg.types.varying_axes import vary

Backward = tuple[Body, Placing, tuple[core.JaxprEqn, ...]]


def asks(equation: Equation) -> bool:
    """Return whether the rule of a call may ask which results have a cotangent."""
    return equation.name.startswith("custom_vjp_call") and bool(equation.params.get("symbolic_zeros"))


def is_zero(cotangent: Any) -> bool:
    """Return whether a result has no cotangent."""
    return isinstance(cotangent, SymbolicZero) or cotangent.dtype == float0


def backward_of(equation: Equation, rule: VjpRule, cotangents: Sequence[Any], solutions: Placing) -> Backward | None:
    """Return the backward program of a call for the cotangents that are not zero, its solutions, and the calls with rules in it.

    Return None if the program for all cotangents is to be run, with zeros: the rule does not ask, no cotangent is zero, or the
    results of the other program cannot be placed as planned.

    Args:
        equation: the call.
        rule: its rule for all cotangents.
        cotangents: the cotangents of the call's results.
        solutions: the solution of the rule's backward program along each axis.
    """
    nonzero = tuple(not is_zero(c) for c in cotangents)
    if not asks(equation) or all(nonzero) or nonzero == rule.nonzero:
        return None
    with suppress(Unreadable, Unmatched):
        pulled = pull(equation, differentiable_operands(equation))
        body, count = backward_body(pulled, nonzero), len(rule.backward.inputs) - len(cotangents)
        flags = (True,) * count + nonzero
        states = [(UNUSED,) * len(flags) if s is None else s.operands for s in solutions]
        goals = [(UNUSED,) * len(rule.backward.outputs) if s is None else s.results for s in solutions]
        types = tuple(zip(*(chosen_of(flags, each) for each in states), strict=True))
        results = tuple(zip(*goals, strict=True))
        own = placing(body, types, results, len(solutions))
        if has_results(body, own, results):
            return body, own, backward_calls(pulled, nonzero)
    return None


def with_zeros(equation: Equation, rule: VjpRule, cotangents: Sequence[Any], placed: Sequence[PlacedTensor]) -> list[Any]:
    """Return the cotangents of a call's results, with arrays of zeros in the place of symbolic ones.

    Raises:
        CaptureError: if the rule could be traced only without a cotangent, and that one is not a symbolic zero.
    """
    types = [rule.backward.tensors[v].dtype for v in rule.backward.inputs[len(rule.backward.inputs) - len(cotangents) :]]
    zero = [is_zero(c) for c in cotangents]
    if any(not z and not flag for z, flag in zip(zero, rule.nonzero, strict=True)):
        raise CaptureError(
            f"{equation.source or equation.name}: a gradient flows to a result of a custom_vjp that is the same for all of a batch,"
            " which its derivative rule refuses.\n    Pass `generic_batching=True` to its `defvjp`, as JAX asks for."
            " (docs: capture#derivative-rules)"
        )
    values = [jnp.zeros(c.shape, t) if z else c for c, t, z in zip(cotangents, types, zero, strict=True)]
    return [v if not z else vary(v, p.varying_axes) for v, z, p in zip(values, zero, placed, strict=True)]
