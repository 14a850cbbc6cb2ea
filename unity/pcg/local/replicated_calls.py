"""Calls that every device runs whole although they have derivative rules, or primitives, that JAX cannot run inside of a mesh.

Which operands are differentiated is known only when the program is. Then their rule is read outside of the mesh (`pcg/custom.py`)
and run here as a program like any other.
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
from unity.pcg.operators.kernel_primitive import KERNEL
from unity.pcg.propagation.derivative_rules import (
    Unreadable,
    backward_body,
    differentiable_operands,
    is_readable,
    jvp_body,
    pull,
    value_body,
)
from unity.pcg.types.varying_axes import vary, varying

Run = Callable[[Body, Sequence[Any]], list]


def program(equation: Equation) -> Body | None:
    """What a custom call, or a primitive of another package, computes; None of others."""
    return value_body(equation) if equation.origin is not None and _asks(equation.origin) else None


def _asks(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name in RULED or own_program(eqn) is not None


@lru_cache(maxsize=4096)
def asks(equation: Equation) -> bool:
    """Whether there is such an equation, or a kernel, inside of one."""
    return equation.origin is not None and any(_asks(e) or e.primitive.name == KERNEL for e in equations(equation.origin))


def call(equation: Equation, value: Body, operands: Sequence[Any], run: Run) -> list:
    """The results of such an equation, all of whose operands are whole."""
    return (_jvp if equation.name == "custom_jvp_call" and is_readable(equation) else _vjp)(equation, value, operands, run)


def _jvp(equation: Equation, value: Body, operands: Sequence[Any], run: Run) -> list:
    @jax.custom_jvp
    def whole(*primals: Any) -> Any:
        return run(value, primals)

    def derivative(primals: Any, tangents: Any) -> Any:
        moving = tuple(not isinstance(t, SymbolicZero) for t in tangents)
        out = run(jvp_body(equation, moving).body, (*primals, *(t for t in tangents if not isinstance(t, SymbolicZero))))
        return out[: len(out) // 2], out[len(out) // 2 :]

    whole.defjvp(derivative, symbolic_zeros=True)
    return whole(*operands)


def _vjp(equation: Equation, value: Body, operands: Sequence[Any], run: Run) -> list:
    """By reverse differentiation only.

    What is kept must have one structure, whatever is differentiated: JAX may take it for that of another time. So, where the
    rule allows it, all operands are differentiated, and otherwise the operands are kept, and the forward rule runs again. Only
    arrays are kept, so which operands are differentiated is said by the lengths of arrays without elements.
    """
    everything, n = _all_that_can(equation), len(equation.results)
    differ = [varying(x) for x in operands]

    @jax.custom_vjp
    def whole(*primals: Any) -> Any:
        return run(value, primals)

    def forward(*given: Any) -> Any:
        moving, primals = tuple(g.perturbed for g in given), [g.value for g in given]
        out = run(pull(equation, everything or moving).forward, primals)
        return out[:n], (out[n:] if everything else (primals, [jnp.zeros((int(m), 0)) for m in moving]))

    def backward(kept: Any, cotangents: Any) -> Any:
        moving = everything or tuple(bool(len(mark)) for mark in kept[1])
        pulled = pull(equation, moving)
        residuals = kept if everything else run(pulled.forward, kept[0])[n:]
        given = [not isinstance(c, SymbolicZero) for c in cotangents]
        real = [c for c in cotangents if not isinstance(c, SymbolicZero)]
        found = iter(run(backward_body(pulled, tuple(given)), (*residuals, *real)))
        return tuple(vary(next(found), names) if m else None for m, names in zip(moving, differ, strict=True))

    whole.defvjp(forward, backward, symbolic_zeros=True)
    return whole(*operands)


@lru_cache(maxsize=4096)
def _all_that_can(equation: Equation) -> tuple[bool, ...] | None:
    """All operands that a rule may differentiate; None if it refuses some, without saying which."""
    everything = differentiable_operands(equation)
    try:
        pulled = pull(equation, everything)
        backward_body(pulled, tuple(jnp.issubdtype(r.dtype, jnp.inexact) for r in pulled.results))
    except Unreadable:
        return None
    return everything
