"""Custom derivative rules of local programs as programs themselves, traced on one device's pieces inside a `shard_map`.

As in `unity.pcg.propagation.derivative_rules` for whole tensors, the rule's program is traced by differentiating the call. In it,
calls with rules of their own are replaced by the programs of their values. If a second derivative would need such a rule, the
exported file refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from unity.base.errors import PlanError
from unity.export.tracing import LocalProgram, closed, like, traced
from unity.pcg.ir.program import Equation
from unity.pcg.jaxprs.jaxprs import CUSTOM_JVP, called
from unity.pcg.propagation.derivative_rules import as_function, differentiable_operands


@dataclass(frozen=True, eq=False)
class DerivativeRule:
    """A call and its derivative rule.

    Attributes:
        value: the program of the call.
        floating: whether each operand is floating-point.
        forward: for a `custom_vjp`, operands → (results, residuals).
        backward: for a `custom_vjp`, (residuals, cotangents of the results) → cotangents of the floating-point operands.
        derivative: for a `custom_jvp`, (operands, tangents of the floating-point ones) → (results, their tangents).
        once: whether a second derivative is refused, because its programs call functions whose rules are not their derivatives.
    """

    value: LocalProgram
    floating: tuple[bool, ...]
    forward: LocalProgram | None = None
    backward: LocalProgram | None = None
    derivative: LocalProgram | None = None
    once: bool = False


@lru_cache(maxsize=4096)
def rule_of(equation: Equation) -> DerivativeRule:
    """Return the programs of an equation's custom rule. Must be called inside the `shard_map` that the equation was traced in."""
    assert equation.origin is not None
    pieces = [like(v.aval) for v in equation.origin.invars]
    floating = differentiable_operands(equation)
    value = closed(called(equation.params))
    call = as_function(equation)

    def of_floating(operands: Any) -> Any:
        others = [x for x, f in zip(operands, floating, strict=True) if not f]

        def run(*floats: Any) -> Any:
            a, b = iter(floats), iter(others)
            return call(*(next(a) if f else next(b) for f in floating))

        return run, [x for x, f in zip(operands, floating, strict=True) if f]

    if equation.name in CUSTOM_JVP:

        def derivative(*operands: Any) -> Any:
            run, floats = of_floating(operands[: len(pieces)])
            return jax.jvp(run, tuple(floats), tuple(operands[len(pieces) :]))

        operands = [*pieces, *(p for p, f in zip(pieces, floating, strict=True) if f)]
        program = traced(derivative, operands, rule=True)
        return DerivativeRule(value, floating, derivative=program, once=_is_once(derivative, operands))
    residuals: dict[str, Any] = {}

    def forward(*operands: Any) -> Any:
        run, floats = of_floating(operands)
        results, pull = jax.vjp(run, *floats)
        leaves, residuals["tree"] = jax.tree.flatten(pull)
        residuals["leaves"] = [like(jax.typeof(x)) for x in leaves]
        residuals["results"] = [like(jax.typeof(x)) for x in results]
        return [*results, *leaves]

    forward_program = traced(forward, pieces, rule=True)

    def backward(*operands: Any) -> Any:
        n = len(residuals["leaves"])
        return jax.tree.unflatten(residuals["tree"], operands[:n])(list(operands[n:]))

    operands = [*residuals["leaves"], *residuals["results"]]
    backward_program = traced(backward, operands, rule=True)
    once = _is_once(forward, pieces) or _is_once(backward, operands)
    return DerivativeRule(value, floating, forward_program, backward_program, once=once)


def _is_once(run: Callable[..., Any], pieces: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Return whether a plan (`unity.pcg.local.second_derivatives`), or a file of one, refuses to differentiate a rule.

    What JAX itself refuses to differentiate, such as a callback, it refuses in the file, too.
    """
    floats = [k for k, p in enumerate(pieces) if jnp.issubdtype(p.dtype, jnp.inexact)]

    def differentiated(*operands: Any) -> Any:
        def of_floats(*values: Any) -> Any:
            whole = dict(enumerate(operands)) | dict(zip(floats, values, strict=True))
            return run(*whole.values())

        return jax.vjp(of_floats, *(operands[k] for k in floats))[0]

    try:
        jax.make_jaxpr(differentiated)(*pieces)
    except (PlanError, NotImplementedError):
        return True
    except Exception:  # JAX has no derivative of the rule
        return False
    return False
