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
from jax.extend import core

from unity.pcg.body import Body, Equation, close

# Inside a rule nothing is differentiated again, so custom calls there are their bodies.
FIRST_ORDER = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})


@dataclass(frozen=True, eq=False)
class JvpRule:
    """`body`: (primals, tangents of the floating ones) → (results, their tangents)."""

    body: Body
    floating: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class VjpRule:
    """`forward`: primals → (results, residuals). `backward`: (residuals, cotangents) → cotangents of the floating primals."""

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


def _abstract(equation: Equation) -> tuple[list[jax.ShapeDtypeStruct], tuple[bool, ...]]:
    eqn = equation.origin
    assert eqn is not None
    avals: list[Any] = [v.aval for v in eqn.invars]
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    return structs, tuple(jnp.issubdtype(s.dtype, jnp.inexact) for s in structs)


def _traced(rule: Callable[..., Any], *structs: Any) -> core.ClosedJaxpr:
    """A rule's program, in the precision that its arguments have, whatever is switched on by now."""
    wide = any(getattr(s.dtype, "itemsize", 0) == 8 for s in jax.tree.leaves(structs))
    with jax.enable_x64(True) if wide else nullcontext():
        return jax.make_jaxpr(rule)(*structs)


def _merge(floating: tuple[bool, ...], chosen: Any, others: Any) -> list:
    chosen, others = iter(chosen), iter(others)
    return [next(chosen) if f else next(others) for f in floating]


@lru_cache(maxsize=1024)
def jvp_body(equation: Equation) -> JvpRule:
    """The program of a `custom_jvp`'s rule."""
    call = as_function(equation)
    structs, floating = _abstract(equation)

    def rule(primals: Any, tangents: Any) -> Any:
        others = [p for p, f in zip(primals, floating, strict=True) if not f]
        chosen = [p for p, f in zip(primals, floating, strict=True) if f]
        return jax.jvp(lambda *c: call(*_merge(floating, c, others)), tuple(chosen), tuple(tangents))

    tangents = [s for s, f in zip(structs, floating, strict=True) if f]
    return JvpRule(close(_traced(rule, structs, tangents), FIRST_ORDER), floating)


@lru_cache(maxsize=1024)
def vjp_bodies(equation: Equation) -> VjpRule:
    """The programs of a `custom_vjp`'s forward and backward rules."""
    call = as_function(equation)
    structs, floating = _abstract(equation)
    shapes: dict[str, Any] = {}

    def forward(*primals: Any) -> Any:
        others = [p for p, f in zip(primals, floating, strict=True) if not f]
        chosen = [p for p, f in zip(primals, floating, strict=True) if f]
        results, pull = jax.vjp(lambda *c: call(*_merge(floating, c, others)), *chosen)
        residuals, shapes["pull"] = jax.tree.flatten(pull)
        shapes["results"] = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]
        shapes["residuals"] = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in residuals]
        return [*results, *residuals]

    first = close(_traced(forward, *structs), FIRST_ORDER)

    def backward(residuals: Any, cotangents: Any) -> Any:
        return jax.tree.unflatten(shapes["pull"], residuals)(list(cotangents))

    second = close(_traced(backward, shapes["residuals"], shapes["results"]), FIRST_ORDER)
    return VjpRule(first, second, floating)
