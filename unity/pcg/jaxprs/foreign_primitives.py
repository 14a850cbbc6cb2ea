"""Primitives that other packages made, such as the linear solves of Lineax, and functions that JAX keeps as one primitive
(`pcg/held.py`): their programs in JAX's own primitives.

Their rules, for derivatives and for lowering, are functions of their packages, which compare the types that they get with those
they were made for. Inside of a `shard_map` types say along which axes values differ, so there they would refuse everything.

So a program has in their place what they compute, with their own derivative, in reverse, as the rule of a `custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives
from jax.interpreters.ad import Zero

from unity.pcg.jaxprs.function_primitives import HELD, function_of, name_of
from unity.pcg.jaxprs.jaxprs import RULED, Program, called, equations, floating, with_equations
from unity.pcg.jaxprs.mesh_context import apart, forgotten
from unity.pcg.jaxprs.weak_types import struct_of
from unity.pcg.types.factors import TABLE
from unity.pcg.types.varying_axes import CAST

WIDE = frozenset({"int64", "uint64", "float64", "complex128"})  # those that JAX has with 64 bits switched on alone


def foreign(primitive: core.Primitive) -> bool:
    """Whether a primitive is neither JAX's own nor in the operator table, and has an implementation."""
    made = getattr(primitive.impl, "func", primitive.impl)
    return primitive.name not in TABLE and primitive.name != CAST and made.__module__.partition(".")[0] not in ("jax", "jaxlib")


def own_program(eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """What a foreign primitive computes, as a program; None of others, and of one that only computes with numbers."""
    held = name_of(eqn.primitive.name, eqn.params) == HELD
    return _implementation(eqn, held) if held or foreign(eqn.primitive) else None


@lru_cache(maxsize=1024)
def _implementation(eqn: core.JaxprEqn, held: bool) -> core.ClosedJaxpr | None:
    run = function_of(eqn.params) if held else partial(eqn.primitive.impl, **eqn.params)
    try:
        return outside(run, [v.aval for v in eqn.invars])
    except Exception:  # its implementation is not in terms of JAX
        return None


def outside(run: Any, arguments: Any) -> core.ClosedJaxpr:
    """A function's program outside of any mesh, in the precision that its arguments have, whatever is switched on by now."""
    structs = jax.tree.map(struct_of, arguments)
    wide = any(str(s.dtype) in WIDE for s in jax.tree.leaves(structs))
    with jax.enable_x64(True) if wide else nullcontext(), apart():
        return forgotten(jax.make_jaxpr(run)(*structs))


@lru_cache(maxsize=1024)
def adopted(eqn: core.JaxprEqn, still: tuple[bool, ...]) -> core.ClosedJaxpr | None:
    """The program that stands for a foreign primitive; None of others, and of one whose rules cannot be read, which stays.

    `still`: to which operands no gradient flows. Rules may refuse to be differentiated by these.
    """
    program = own_program(eqn)
    if program is None or not any(floating(v.aval) for v in eqn.outvars):
        return program  # without real numbers among the results there are no derivatives
    try:
        return outside(_with_rules(eqn, program, still), [v.aval for v in eqn.invars])
    except Exception:  # a rule refuses some operands, or results
        return None


def _with_rules(eqn: core.JaxprEqn, program: core.ClosedJaxpr, still: tuple[bool, ...]) -> Callable[..., list]:
    """A foreign primitive as a function of its operands. Its rules are read once, for all operands and results that are real."""
    moving = [floating(v.aval) and not s for v, s in zip(eqn.invars, still, strict=True)]
    real = [floating(v.aval) for v in eqn.outvars]
    kept: dict[str, Any] = {}

    def forward(*given: Any) -> list:
        def run(*chosen: Any) -> list:
            found = eqn.primitive.bind(*merged(moving, chosen, chosen_of(moving, given, False)), **eqn.params)
            return list(found) if eqn.primitive.multiple_results else [found]

        results, back = jax.vjp(run, *chosen_of(moving, given))
        residuals, kept["tree"] = jax.tree.flatten(back)
        return [*results, *residuals]

    def backward(residuals: Any, cotangents: Any) -> list:
        zeros = [Zero(v.aval.to_tangent_aval()) for v in chosen_of(real, eqn.outvars, False)]
        return list(jax.tree.unflatten(kept["tree"], residuals)(merged(real, cotangents, zeros)))

    n, avals = len(eqn.outvars), [v.aval for v in eqn.outvars]
    first = outside(forward, [v.aval for v in eqn.invars])
    second = outside(backward, [first.out_avals[n:], chosen_of(real, avals)])
    run, back = core.jaxpr_as_fun(first_order(first)), core.jaxpr_as_fun(first_order(second))  # they may have the primitive, too

    call = jax.custom_vjp(lambda *given: core.jaxpr_as_fun(program)(*given))
    call.defvjp(
        lambda *given: (lambda out: (out[:n], out[n:]))(run(*given)),
        lambda residuals, cotangents: tuple(
            merged(moving, back(*residuals, *chosen_of(real, cotangents)), [None] * moving.count(False))
        ),
    )
    return call


def first_order(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A rule's program, in which custom calls, in loops and branches too, are their bodies: nothing there is differentiated again.

    Not only to save work: the rule of an `odeint` solves another, larger equation by `odeint`, and so on without end. Foreign
    primitives are what they compute, too.
    """
    return with_equations(program, _as_body)


def _as_body(eqn: core.JaxprEqn) -> core.JaxprEqn:
    program = own_program(eqn)
    if eqn.primitive.name in RULED:
        program = called(eqn.params)
    if program is None:
        return eqn.replace(params={name: with_equations(value, _as_body) for name, value in eqn.params.items()})
    return eqn.replace(primitive=primitives.closed_call_p, params={"call_jaxpr": with_equations(program, _as_body)})


def chosen_of(flags: Sequence[bool], values: Sequence[Any], wanted: bool = True) -> list:
    """The values with such a flag."""
    return [v for v, f in zip(values, flags, strict=True) if f == wanted]


def merged(flags: Sequence[bool], chosen: Any, others: Any) -> list:
    """All values again, from those with a flag and those without."""
    chosen, others = iter(chosen), iter(others)
    return [next(chosen) if f else next(others) for f in flags]


def with_foreign(program: Program) -> bool:
    """Whether a program has foreign primitives, in loops and branches too."""
    return any(own_program(e) is not None for eqn in program.eqns for e in (eqn, *equations(eqn)))
