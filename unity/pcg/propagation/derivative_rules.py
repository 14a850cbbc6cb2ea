"""Custom derivative rules as programs, so that they can be followed and run on pieces like everything else.

A `custom_jvp` or `custom_vjp` is kept by its rule, not by its body. The rules are read through JAX's own public
transformations: differentiating the call by itself yields the rule's program. They are read outside of any mesh, also where a
`shard_map` is being traced: some compare the types of what they get with those that the function was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax.core import ShapedArray, Tracer
from jax.extend import core
from jax.interpreters.ad import Zero

from unity.base.errors import CaptureError
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Body, Equation, close
from unity.pcg.jaxprs.foreign_primitives import chosen_of, first_order, merged, outside, with_foreign
from unity.pcg.jaxprs.jaxprs import equations, floating
from unity.pcg.jaxprs.weak_types import struct_of
from unity.pcg.operators.kernel_primitive import KERNEL

Flags = tuple[bool, ...]


class Unreadable(CaptureError):
    """A rule that cannot be traced on abstract arguments. If all floating ones were differentiated, its call runs whole; if those
    that a gradient asks for, there is no gradient."""


@dataclass(frozen=True, eq=False)
class JvpRule:
    """`body`: (primals, tangents of the floating ones) → (results, their tangents). `foreign`: it has foreign primitives, or gives
    tangents to kernels."""

    body: Body
    floating: Flags
    foreign: bool


@dataclass(frozen=True, eq=False)
class VjpRule:
    """`forward`: primals → (results, residuals). `backward`: (residuals, cotangents) → cotangents of the `floating` primals."""

    forward: Body
    backward: Body
    floating: Flags


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
    return [struct_of(a) for a in avals]


def ruled(equation: Equation) -> tuple[bool, ...]:
    """Which operands of a call its rule differentiates: floating ones, but not what a custom_vjp closes over.

    JAX says how many those are only until the call is traced once more; they are constants then.
    """
    real = tuple(map(floating, _abstract(equation)))
    if not equation.name.startswith("custom_vjp_call"):
        return real
    closed_over = equation.params.get("num_consts", 0)
    still = equation.still or (False,) * len(real)
    given = enumerate(zip(equation.operands, still, strict=True))
    constant = [k < closed_over or not isinstance(a, int) or s for k, (a, s) in given]
    return tuple(f and not c for f, c in zip(real, constant, strict=True))


def _traced(equation: Equation, rule: Callable[..., Any], *structs: Any) -> core.ClosedJaxpr:
    """A rule's program."""
    try:
        made = outside(rule, structs)
    except jax.errors.UnexpectedTracerError as error:
        raise _leak(equation) from error
    except Exception as error:  # it looks at values, or refuses what is differentiated here: every floating argument
        name = equation.name.removesuffix("_call")
        raise Unreadable(
            f"{equation.source or name}: the derivative rule of a {name} cannot be traced for what is differentiated: {error}\n"
            "    Differentiate by other arguments, as the rule asks for. (docs: capture#derivative-rules)"
        ) from error
    if any(isinstance(c, Tracer) for c in made.consts):
        raise _leak(equation)
    return made


def _leak(equation: Equation) -> CaptureError:
    return CaptureError(
        f"{equation.source or equation.name}: the derivative rule of a {equation.name.removesuffix('_call')} uses a value that was"
        " computed outside of it.\n    Pass it to the function as an argument, as jax.grad of a jax.jit asks, too."
        " (docs: capture#derivative-rules)"
    )


def readable(equation: Equation) -> bool:
    """Whether the rule of a `custom_jvp` can be traced, and JAX transpose it then: foreign primitives, and kernels, have rules of
    their own."""
    try:
        return not jvp_body(equation).foreign
    except Unreadable:
        return False


@lru_cache(maxsize=1024)
def value_body(equation: Equation) -> Body | None:
    """What a custom call, or a foreign primitive, computes; None if that has no program."""
    call = as_function(equation)
    try:
        made = first_order(outside(call, _abstract(equation)))
    except Exception:  # it cannot be traced by itself, and is left to JAX as it is
        return None
    return close(made)


@lru_cache(maxsize=1024)
def jvp_body(equation: Equation, differentiated: Flags | None = None) -> JvpRule:
    """The program of a `custom_jvp`'s rule, if these operands are differentiated (all that can be)."""
    call = as_function(equation)
    structs, floating = _abstract(equation), differentiated or ruled(equation)

    def rule(primals: Any, tangents: Any) -> Any:
        others, chosen = chosen_of(floating, primals, False), chosen_of(floating, primals)
        return jax.jvp(lambda *c: call(*merged(floating, c, others)), tuple(chosen), tuple(tangents))

    made = _traced(equation, rule, structs, chosen_of(floating, structs))
    foreign = with_foreign(made) or _moves_kernels(made.jaxpr, made.jaxpr.invars[len(structs) :])
    return JvpRule(used(close(first_order(made))), floating, foreign)


def _moves_kernels(program: core.Jaxpr, tangents: Sequence[core.Var]) -> bool:
    """Whether kernels read what depends on tangents."""
    moving = set(tangents)
    for eqn in program.eqns:
        if any(isinstance(v, core.Var) and v in moving for v in eqn.invars):
            if any(e.primitive.name == KERNEL for e in (eqn, *equations(eqn))):
                return True
            moving.update(eqn.outvars)
    return False


@lru_cache(maxsize=1024)
def vjp_bodies(equation: Equation) -> VjpRule:
    """The programs of a `custom_vjp`'s forward and backward rules, if all operands are differentiated that can be."""
    pulled = pull(equation, ruled(equation))
    return VjpRule(pulled.forward, backward_body(pulled, (True,) * len(pulled.results)), pulled.floating)


@dataclass(frozen=True, eq=False)
class Pull:
    """A call that was differentiated by some of its operands. `forward`: primals → (results, residuals)."""

    equation: Equation
    floating: Flags
    forward: Body
    tree: Any  # of what JAX keeps
    results: list[ShapedArray]
    residuals: list[ShapedArray]


@lru_cache(maxsize=1024)
def backward_body(pulled: Pull, given: Flags) -> Body:
    """(residuals, cotangents of the `given` results) → cotangents of the `floating` primals; of other results they are zero."""

    def run(residuals: Any, cotangents: Any) -> Any:
        zeros = [Zero(r.to_tangent_aval()) for r in chosen_of(given, pulled.results, False)]
        return jax.tree.unflatten(pulled.tree, residuals)(merged(given, cotangents, zeros))

    return close(first_order(_traced(pulled.equation, run, pulled.residuals, chosen_of(given, pulled.results))))


@lru_cache(maxsize=1024)
def pull(equation: Equation, floating: Flags) -> Pull:
    """A call, differentiated by some of its operands."""
    call, kept = as_function(equation), {}

    def forward(*primals: Any) -> Any:
        others, chosen = chosen_of(floating, primals, False), chosen_of(floating, primals)
        results, back = jax.vjp(lambda *c: call(*merged(floating, c, others)), *chosen)
        residuals, kept["tree"] = jax.tree.flatten(back)
        kept["results"], kept["residuals"] = ([ShapedArray(x.shape, x.dtype) for x in xs] for xs in (results, residuals))
        return [*results, *residuals]

    made = _traced(equation, forward, *_abstract(equation))
    return Pull(equation, floating, close(first_order(made)), **kept)
