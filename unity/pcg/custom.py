"""Custom derivative rules as programs, so that they can be followed and run on pieces like everything else.

A `custom_jvp` or `custom_vjp` is kept by its rule, not by its body. The rules are read through JAX's own public
transformations: differentiating the call by itself yields the rule's program.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core
from jax.extend.core import primitives

from unity.pcg.body import Body, Equation, close
from unity.pcg.errors import CaptureError

RULED = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})


class Unreadable(Exception):
    """A rule that cannot be traced on abstract arguments, all floating ones differentiated: its call runs whole."""


@dataclass(frozen=True, eq=False)
class JvpRule:
    """`body`: (primals, tangents of the floating ones) → (results, their tangents)."""

    body: Body
    floating: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class VjpRule:
    """`forward`: primals → (results, residuals). `backward`: (residuals, cotangents) → cotangents of the `floating` primals."""

    forward: Body
    backward: Body
    floating: tuple[bool, ...]


def as_function(equation: Equation) -> Callable[..., list]:
    """One equation as a function of all its operands (literals and repeated ones included), on whole tensors."""
    eqn = equation.origin
    assert eqn is not None
    operands: list[Any] = [core.Var(v.aval) for v in eqn.invars]
    unnamed = core.DebugInfo(equation.name, "", None, None)
    jaxpr = core.Jaxpr((), operands, eqn.outvars, [eqn.replace(invars=operands)], debug_info=unnamed)
    run = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))
    return lambda *given: list(run(*given))


def _abstract(equation: Equation) -> list[jax.ShapeDtypeStruct]:
    eqn = equation.origin
    assert eqn is not None
    avals: list[Any] = [v.aval for v in eqn.invars]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]


def ruled(equation: Equation) -> tuple[bool, ...]:
    """Which operands of a call its rule differentiates: floating ones, but not what a custom_vjp closes over.

    JAX says how many those are only until the call is traced once more; they are constants then.
    """
    floating = tuple(jnp.issubdtype(s.dtype, jnp.inexact) for s in _abstract(equation))
    if not equation.name.startswith("custom_vjp_call"):
        return floating
    closed_over = equation.params.get("num_consts", 0)
    constant = [k < closed_over or not isinstance(a, int) for k, a in enumerate(equation.operands)]
    return tuple(f and not c for f, c in zip(floating, constant, strict=True))


def _traced(equation: Equation, rule: Callable[..., Any], *structs: Any) -> core.ClosedJaxpr:
    """A rule's program, in the precision that its arguments have, whatever is switched on by now."""
    wide = any(getattr(s.dtype, "itemsize", 0) == 8 for s in jax.tree.leaves(structs))
    with jax.enable_x64(True) if wide else nullcontext():
        try:
            made = jax.make_jaxpr(rule)(*structs)
        except jax.errors.UnexpectedTracerError as error:
            raise _leak(equation) from error
        except Exception as error:  # it looks at values, or refuses what is differentiated here: every floating argument
            raise Unreadable(equation.name) from error
    if any(isinstance(c, Tracer) for c in made.consts):
        raise _leak(equation)
    return first_order(made)


def _leak(equation: Equation) -> CaptureError:
    return CaptureError(
        f"{equation.source or equation.name}: the derivative rule of a {equation.name.removesuffix('_call')} uses a value that was"
        " computed outside of it.\n    Pass it to the function as an argument, as jax.grad of a jax.jit asks, too."
        " (docs: capture#derivative-rules)"
    )


def first_order(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A rule's program, in which custom calls, in loops and branches too, are their bodies: nothing there is differentiated again.

    Not only to save work: the rule of an `odeint` solves another, larger equation by `odeint`, and so on without end.
    """
    return _without_rules(program)


def _without_rules(value: Any) -> Any:
    """A parameter of an equation, with the programs in it so."""
    if isinstance(value, tuple) and any(isinstance(v, core.Jaxpr | core.ClosedJaxpr) for v in value):
        make = getattr(value, "_make", tuple)  # the programs of a linear solve have names
        return make(map(_without_rules, value))
    if isinstance(value, core.Jaxpr):  # since JAX 0.12 a closed one is one, too
        return value.replace(eqns=[_as_body(eqn) for eqn in value.eqns])
    return value.replace(jaxpr=_without_rules(value.jaxpr)) if isinstance(value, core.ClosedJaxpr) else value


def _as_body(eqn: core.JaxprEqn) -> core.JaxprEqn:
    params = {name: _without_rules(value) for name, value in eqn.params.items()}
    if eqn.primitive.name not in RULED:
        return eqn.replace(params=params)
    program = next(params[name] for name in ("call_jaxpr", "fun_jaxpr") if name in params)
    return eqn.replace(primitive=primitives.closed_call_p, params={"call_jaxpr": program})


def readable(equation: Equation) -> bool:
    """Whether the rule of a `custom_jvp` can be traced."""
    try:
        jvp_body(equation)
    except Unreadable:
        return False
    return True


def _merge(floating: tuple[bool, ...], chosen: Any, others: Any) -> list:
    chosen, others = iter(chosen), iter(others)
    return [next(chosen) if f else next(others) for f in floating]


@lru_cache(maxsize=1024)
def jvp_body(equation: Equation) -> JvpRule:
    """The program of a `custom_jvp`'s rule."""
    call = as_function(equation)
    structs, floating = _abstract(equation), ruled(equation)

    def rule(primals: Any, tangents: Any) -> Any:
        others = [p for p, f in zip(primals, floating, strict=True) if not f]
        chosen = [p for p, f in zip(primals, floating, strict=True) if f]
        return jax.jvp(lambda *c: call(*_merge(floating, c, others)), tuple(chosen), tuple(tangents))

    tangents = [s for s, f in zip(structs, floating, strict=True) if f]
    return JvpRule(close(_traced(equation, rule, structs, tangents)), floating)


@lru_cache(maxsize=1024)
def vjp_bodies(equation: Equation) -> VjpRule:
    """The programs of a `custom_vjp`'s forward and backward rules."""
    call = as_function(equation)
    structs, floating = _abstract(equation), ruled(equation)
    shapes: dict[str, Any] = {}

    def forward(*primals: Any) -> Any:
        others = [p for p, f in zip(primals, floating, strict=True) if not f]
        chosen = [p for p, f in zip(primals, floating, strict=True) if f]
        results, pull = jax.vjp(lambda *c: call(*_merge(floating, c, others)), *chosen)
        residuals, shapes["pull"] = jax.tree.flatten(pull)
        shapes["results"] = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]
        shapes["residuals"] = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in residuals]
        return [*results, *residuals]

    first = close(_traced(equation, forward, *structs))

    def backward(residuals: Any, cotangents: Any) -> Any:
        return jax.tree.unflatten(shapes["pull"], residuals)(list(cotangents))

    second = close(_traced(equation, backward, shapes["residuals"], shapes["results"]))
    return VjpRule(first, second, floating)
