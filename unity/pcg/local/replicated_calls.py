"""Calls that every device runs replicated, with derivative rules or primitives that JAX cannot run inside a mesh.

The operands by which a call is differentiated are known only when the program is differentiated. Its rule is then read outside the
mesh (`unity.pcg.propagation.nested.derivative_rules`) and run here like any other program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.foreign_primitives import own_program
from unity.pcg.jaxprs.jaxprs import RULED, equations
from unity.pcg.local.second_derivatives import with_checked_derivative
from unity.pcg.operators.kernel_primitive import KERNEL
from unity.pcg.propagation.nested.derivative_rules import (
    Unreadable,
    backward_body,
    backward_calls,
    differentiable_operands,
    is_readable,
    jvp_body,
    pull,
    unread_operands,
    value_body,
)
from unity.pcg.types.varying_axes import vary, varying

Run = Callable[[Body, Sequence[Any]], list]


def program(equation: Equation) -> Body | None:
    """Return the program of the values of a custom call or a foreign primitive; None for any other equation."""
    return value_body(equation) if equation.origin is not None and _is_call(equation.origin) else None


def _is_call(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation is a custom call or a foreign primitive."""
    return eqn.primitive.name in RULED or own_program(eqn) is not None


@lru_cache(maxsize=4096)
def has_calls(equation: Equation) -> bool:
    """Return whether a custom call, a foreign primitive or a kernel is nested in an equation."""
    return equation.origin is not None and any(_is_call(e) or e.primitive.name == KERNEL for e in equations(equation.origin))


def call(equation: Equation, value: Body, operands: Sequence[Any], run: Run) -> list:
    """Return the results of a call whose operands are all unused.

    Args:
        equation: the call.
        value: its program (`program`).
        operands: their values.
        run: runs a program.
    """
    return (_jvp if equation.name == "custom_jvp_call" and is_readable(equation) else _vjp)(equation, value, operands, run)


def _jvp(equation: Equation, value: Body, operands: Sequence[Any], run: Run) -> list:
    """Run a call that is differentiated by its forward-mode rule.

    Capture puts zeros in the place of operands that nothing reads (`capture.unread_operands`). The rule is traced as if these had a
    tangent, where the operands may have one: without it, the rule could stop the tangents of others.
    """

    @jax.custom_jvp
    def replicated(*primals: Any) -> Any:
        return run(value, primals)

    def derivative(primals: Any, tangents: Any) -> Any:
        active = tuple(not isinstance(t, SymbolicZero) for t in tangents)
        if not all(active):
            unread = unread_operands(equation)
            flags = zip(active, differentiable_operands(equation), strict=True)
            active = tuple(flag or (p in unread and differentiable) for p, (flag, differentiable) in enumerate(flags))
        rule = jvp_body(equation, active)
        primals = with_checked_derivative(primals, rule.calls, equation.source)
        chosen = [(x, t) for x, t, flag in zip(primals, tangents, active, strict=True) if flag]
        out = run(rule.body, (*primals, *(jnp.zeros_like(x) if isinstance(t, SymbolicZero) else t for x, t in chosen)))
        return out[: len(out) // 2], out[len(out) // 2 :]

    replicated.defjvp(derivative, symbolic_zeros=True)
    return replicated(*operands)


def _vjp(equation: Equation, value: Body, operands: Sequence[Any], run: Run) -> list:
    """Run a call that is differentiated in reverse mode only.

    Its residuals must have one structure, whatever is differentiated, since JAX may mistake those of one call for another's. So the
    call is differentiated by all operands if its rule allows that. Otherwise the operands are the residuals, and the forward rule
    runs again. Residuals are arrays, so the lengths of arrays without elements mark the operands that are differentiated.
    """
    everything, n = _all_differentiable(equation), len(equation.results)
    axes = [varying(x) for x in operands]

    @jax.custom_vjp
    def replicated(*primals: Any) -> Any:
        return run(value, primals)

    def forward(*arguments: Any) -> Any:
        active, primals = tuple(x.perturbed for x in arguments), [x.value for x in arguments]
        pulled = pull(equation, everything or active)
        out = run(pulled.forward, with_checked_derivative(primals, pulled.calls, equation.source))
        return out[:n], (out[n:] if everything else (primals, [jnp.zeros((int(flag), 0)) for flag in active]))

    def backward(residuals: Any, cotangents: Any) -> Any:
        active = everything or tuple(bool(len(mark)) for mark in residuals[1])
        pulled = pull(equation, active)
        residuals = residuals if everything else run(pulled.forward, residuals[0])[n:]
        nonzero = tuple(not isinstance(c, SymbolicZero) for c in cotangents)
        nonzero_cotangents = [c for c in cotangents if not isinstance(c, SymbolicZero)]
        values = with_checked_derivative((*residuals, *nonzero_cotangents), backward_calls(pulled, nonzero), equation.source)
        gradients = iter(run(backward_body(pulled, nonzero), values))
        return tuple(vary(next(gradients), names) if flag else None for flag, names in zip(active, axes, strict=True))

    replicated.defvjp(forward, backward, symbolic_zeros=True)
    return replicated(*operands)


@lru_cache(maxsize=4096)
def _all_differentiable(equation: Equation) -> tuple[bool, ...] | None:
    """Return for each operand of a call whether it can be differentiated; None if the rule refuses some that JAX does not name."""
    everything = differentiable_operands(equation)
    try:
        pulled = pull(equation, everything)
        backward_body(pulled, tuple(jnp.issubdtype(r.dtype, jnp.inexact) for r in pulled.results))
    except Unreadable:
        return None
    return everything
