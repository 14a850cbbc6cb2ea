"""Custom derivative rules traced to programs, which are propagated through and run on pieces like any other program.

A `custom_jvp` or `custom_vjp` is differentiated by its rule, not through its body. A rule is read through JAX's public
transformations: differentiating the call alone yields the rule's program. It is read outside any mesh, even while a `shard_map` is
being traced, since some rules compare the types of their arguments with those for which the function was created.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import jax
from jax.core import ShapedArray, Tracer
from jax.dtypes import float0
from jax.extend import core

from unity.base.errors import CaptureError, reason_of
from unity.base.formatting import with_article
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Body, Equation, close, tensor_type
from unity.pcg.jaxprs.effects import pruned, warn
from unity.pcg.jaxprs.foreign_primitives import first_order, outside, ruled_calls, with_foreign
from unity.pcg.jaxprs.jaxprs import NESTING, RULED, callable_of, chosen_of, equations, floating, merged
from unity.pcg.jaxprs.pullbacks import EquationPullback
from unity.pcg.jaxprs.ragged_products import with_plain_dimensions
from unity.pcg.jaxprs.weak_types import struct_of
from unity.pcg.operators.kernel_primitive import KERNEL
from unity.pcg.operators.pallas_kernels import with_kernels
from unity.pcg.propagation.nested.programs import nested_body

P = ParamSpec("P")
T = TypeVar("T")
Flags = tuple[bool, ...]
VALUE = -1  # in the place of an operand: a result of the call


class Unreadable(CaptureError):
    """A rule that cannot be traced on abstract arguments.

    If this happens with all floating-point operands differentiated, the call runs replicated. If it happens with only those that a
    gradient needs, the function has no gradient.
    """


@dataclass(frozen=True, eq=False)
class JvpRule:
    """The program of a `custom_jvp`'s rule.

    Attributes:
        body: (primals, tangents of the `floating` ones) → (results, their tangents).
        floating: for each primal whether it has a tangent.
        foreign: whether the rule has foreign primitives, or passes tangents to kernels.
        calls: the calls with rules of their own in it, which `body` has without their rules.
    """

    body: Body
    floating: Flags
    foreign: bool
    calls: tuple[core.JaxprEqn, ...] = ()


@dataclass(frozen=True, eq=False)
class VjpRule:
    """The programs of a `custom_vjp`'s rules.

    Attributes:
        forward: primals → (results, residuals).
        backward: (residuals, cotangents) → cotangents of the `floating` primals.
        floating: for each primal whether it has a cotangent.
        calls: the calls with rules of their own in both, which the programs have without their rules.
        nonzero: for each result whether its cotangent is read. The others must be zero, or the rule cannot be traced.
    """

    forward: Body
    backward: Body
    floating: Flags
    calls: tuple[core.JaxprEqn, ...] = ()
    nonzero: Flags = ()


def _remembered(read: Callable[P, T]) -> Callable[P, T]:
    """Cache the rules that a function reads, and which it cannot: the search asks again with all states around a call."""

    @lru_cache(maxsize=1024)
    def outcome(*args: Any, **options: Any) -> T | Unreadable:
        try:
            return read(*args, **options)
        except Unreadable as error:
            return error

    @wraps(read)
    def remembered(*args: P.args, **options: P.kwargs) -> T:
        rule = outcome(*args, **options)
        if isinstance(rule, Unreadable):
            raise rule.with_traceback(None)
        return rule

    return remembered


def as_function(equation: Equation) -> Callable[..., list]:
    """Return an equation as a function of all its operands (including literals and duplicates), on whole tensors."""
    if equation.origin is not None:
        return callable_of(equation.origin)
    assert equation.name not in NESTING  # JAX has no program of a rewritten equation with nested ones

    def run(*operands: Any) -> list:
        results = equation.primitive.bind(*operands, **equation.params)
        return list(results) if equation.primitive.multiple_results else [results]

    return run


def _abstract_operands(equation: Equation) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and types of an equation's operands."""
    eqn = equation.origin
    assert eqn is not None
    avals: list[Any] = [v.aval for v in eqn.invars]
    return [struct_of(a) for a in avals]


def _result_types(equation: Equation) -> list[Any]:
    """Return the types of an equation's results."""
    assert equation.origin is not None
    return [v.aval for v in equation.origin.outvars]


def differentiable_operands(equation: Equation) -> Flags:
    """Return for each operand of a call whether its rule differentiates it: floating ones that gradients flow to.

    If gradients flow to no operand of a custom_jvp, its rule differentiates all floating ones.
    A custom_vjp differentiates no operand that it closes over. JAX reports how many these are only until the call is traced again;
    after that they are constants.
    """
    floats = tuple(map(floating, _abstract_operands(equation)))
    inactive = equation.inactive or (False,) * len(floats)
    if not equation.name.startswith("custom_vjp_call"):
        active = tuple(f and not fixed for f, fixed in zip(floats, inactive, strict=True))
        return active if any(active) else floats
    closed_over = equation.params.get("num_consts", 0)
    flagged = enumerate(zip(equation.operands, inactive, strict=True))
    constant = [k < closed_over or not isinstance(a, int) or fixed for k, (a, fixed) in flagged]
    return tuple(f and not c for f, c in zip(floats, constant, strict=True))


def _traced(equation: Equation, rule: Callable[..., Any], *structs: Any) -> core.ClosedJaxpr:
    """Return the program of a rule of `equation`, traced on `structs`. Raises Unreadable if the rule cannot be traced."""
    try:
        program = outside(rule, structs, _result_types(equation))
    except jax.errors.UnexpectedTracerError as error:
        raise _leak(equation) from error
    except Exception as error:  # it reads values, or refuses to be differentiated by all of these operands
        name, reason = equation.name.removesuffix("_call"), reason_of(error)
        raise Unreadable(
            f"{equation.source or name}: the derivative rule of {with_article(name)} cannot be traced for what is"
            f" differentiated: {reason}\n"
            "    Differentiate by other arguments, as the rule asks for. (docs: capture#derivative-rules)"
        ) from error
    if any(isinstance(c, Tracer) for c in program.consts):
        raise _leak(equation)
    program, notices = pruned(program)
    warn(notices)
    return with_kernels(with_plain_dimensions(program))


def _leak(equation: Equation) -> CaptureError:
    """Return the error for a rule that uses a tracer of an enclosing trace."""
    return CaptureError(
        f"{equation.source or equation.name}: the derivative rule of {with_article(equation.name.removesuffix('_call'))} uses a"
        " value that was computed outside of it.\n    Pass it to the function as an argument, as jax.grad of a jax.jit asks, too."
        " (docs: capture#derivative-rules)"
    )


def is_readable(equation: Equation) -> bool:
    """Return whether the rule of a `custom_jvp` can be traced and then transposed by JAX.

    JAX cannot transpose foreign primitives and kernels, which have their own rules.
    """
    try:
        return not jvp_body(equation).foreign
    except Unreadable:
        return False


def value_body(equation: Equation) -> Body | None:
    """Return the program of the values of a custom call or a foreign primitive; None if it cannot be traced."""
    return None if equation.origin is None else _values_of(equation.origin)


@lru_cache(maxsize=1024)
def _values_of(eqn: core.JaxprEqn) -> Body | None:
    """Return the program of the values of JAX's equation, traced once for all rewritten programs that have it."""
    structs = [struct_of(v.aval) for v in eqn.invars]
    try:
        program = first_order(outside(callable_of(eqn), structs, [v.aval for v in eqn.outvars]))
    except Exception:  # it cannot be traced alone, and is left to JAX unchanged
        return None
    return close(with_kernels(with_plain_dimensions(program)))


@_remembered
def jvp_body(equation: Equation, differentiated: Flags | None = None) -> JvpRule:
    """Return the program of a `custom_jvp`'s rule.

    Args:
        equation: the call.
        differentiated: for each operand whether it has a tangent; by default all that can have one.
    """
    call = as_function(equation)
    structs, floating = _abstract_operands(equation), differentiated or differentiable_operands(equation)

    def rule(primals: Any, tangents: Any) -> Any:
        others, chosen = chosen_of(floating, primals, False), chosen_of(floating, primals)
        return jax.jvp(lambda *c: call(*merged(floating, c, others)), tuple(chosen), tuple(tangents))

    program = _traced(equation, rule, structs, chosen_of(floating, structs))
    foreign = with_foreign(program) or _differentiates_kernels(program.jaxpr, program.jaxpr.invars[len(structs) :])
    return JvpRule(used(close(first_order(program))), floating, foreign, ruled_calls(program))


@lru_cache(maxsize=1024)
def unread_operands(call: Equation) -> frozenset[int]:
    """Return the operands of a `custom_jvp` that neither its program nor its derivative rule reads, by value or by tangent.

    The rule may still ask whether they have a tangent (`symbolic_zeros`), and stop the tangents of other operands if not.
    """
    program = value_body(call)
    if program is None:
        return frozenset()
    places = _unread_inputs(program)
    if not places:  # nearly always; tracing a rule is slow
        return frozenset()
    try:
        rule = jvp_body(call)
    except Unreadable:
        return frozenset()
    read_by_rule = _read_variables(rule.body)
    tangents = iter(rule.body.inputs[len(call.operands) :])
    active = [floating and next(tangents) in read_by_rule for floating in rule.floating]
    return frozenset(p for p in places if rule.body.inputs[p] not in read_by_rule and not active[p])


@_remembered
def read_residuals(call: Equation) -> tuple[int, ...]:
    """Return the residuals of a `custom_vjp`, by number, that its backward program reads.

    A rule may save an operand only to ask for its shape.
    """
    rule = vjp_bodies(call)
    read = _read_variables(rule.backward)
    return tuple(k for k in range(len(rule.forward.outputs) - len(call.results)) if rule.backward.inputs[k] in read)


def ignored_operands(call: Equation) -> frozenset[int]:
    """Return the operands of a `custom_vjp`, by number, on whose values neither its results nor its residuals depend.

    They may have a cotangent all the same. Where the call is not differentiated, its program runs in the place of the rule, which
    may read other operands.
    """
    ignored = _unread_inputs(nested_body(call))
    if not ignored or call.undifferentiated:
        return ignored
    try:
        forward, residuals = vjp_bodies(call).forward, read_residuals(call)
    except Unreadable:
        return frozenset()
    results = len(call.results)
    outputs = (*forward.outputs[:results], *(forward.outputs[results + k] for k in residuals))
    return ignored & _unread_inputs(replace(forward, outputs=outputs))


def _unread_inputs(body: Body) -> frozenset[int]:
    """Return the inputs of a body, by number, that its outputs do not depend on."""
    read = _read_variables(body)
    return frozenset(p for p, v in enumerate(body.inputs) if v not in read)


def _read_variables(body: Body) -> set[int]:
    """Return the variables that a body's outputs depend on."""
    equations = used(body).equations
    return {a for e in equations for a in e.operands if isinstance(a, int)} | {a for a in body.outputs if isinstance(a, int)}


def _differentiates_kernels(program: core.Jaxpr, tangents: Sequence[core.Var]) -> bool:
    """Return whether a kernel reads values that depend on tangents."""
    active = set(tangents)
    for eqn in program.eqns:
        if any(isinstance(v, core.Var) and v in active for v in eqn.invars):
            if any(e.primitive.name == KERNEL for e in (eqn, *equations(eqn))):
                return True
            active.update(eqn.outvars)
    return False


def is_reverse_only(equation: Equation) -> bool:
    """Return whether a call can be differentiated in reverse mode only.

    A custom_vjp has no other rule. A `custom_jvp` may have one that cannot be traced or transposed, or that returns constants as
    tangents of integers, which in JAX cannot vary between devices.
    """
    if equation.undifferentiated or equation.name not in RULED:
        return False
    if equation.name != "custom_jvp_call" or not is_readable(equation):
        return True
    return any(not isinstance(a, int) and a.tensor.dtype == float0 for a in jvp_body(equation).body.outputs)


@_remembered
def vjp_bodies(equation: Equation) -> VjpRule:
    """Return the forward and backward programs of a `custom_vjp`, differentiated by every operand that can be."""
    pulled = pull(equation, differentiable_operands(equation))
    nonzero = readable_cotangents(pulled)
    calls = pulled.calls + backward_calls(pulled, nonzero)
    backward = _with_unread_cotangents(backward_body(pulled, nonzero), pulled, nonzero)
    return VjpRule(pulled.forward, backward, pulled.floating, calls, nonzero)


@lru_cache(maxsize=1024)
def readable_cotangents(pulled: Pull) -> Flags:
    """Return the results whose cotangents a rule is traced with: all, unless it refuses those of results without a derivative.

    Since JAX 0.12 the rule of a batched `custom_vjp` refuses cotangents of results that are shared by the batch, as it would count
    them once for each sample: the time in a solver's loop, say, beside the solution of each sample. They are zero in a program that
    has a gradient.
    """
    everything = (True,) * len(pulled.results)
    return everything if _is_readable(pulled, everything) else _moving_results(pulled)


def _moving_results(pulled: Pull) -> Flags:
    """Return for each result of a call whether its program has a derivative of it by an operand that is differentiated."""
    equation, floats = pulled.equation, pulled.floating
    assert equation.origin is not None
    structs = _abstract_operands(equation)
    values = first_order(outside(callable_of(equation.origin), structs, _result_types(equation)))

    def tangents(primals: Any, tangents: Any) -> Any:
        others = chosen_of(floats, primals, False)
        run = core.jaxpr_as_fun(values)
        return jax.jvp(lambda *c: run(*merged(floats, c, others)), tuple(chosen_of(floats, primals)), tuple(tangents))[1]

    program = close(_traced(equation, tangents, structs, chosen_of(floats, structs)))
    dependents = _dependents(program, (frozenset({k}) for k in range(len(pulled.results))))
    active = frozenset[int]().union(*(dependents.get(v, ()) for v in program.inputs[len(structs) :]))
    return tuple(k in active for k in range(len(pulled.results)))


def _is_readable(pulled: Pull, nonzero: Flags) -> bool:
    """Return whether a rule can be traced with cotangents of the `nonzero` results."""
    try:
        _backward(pulled, nonzero)
    except Unreadable:
        return False
    return True


def _with_unread_cotangents(backward: Body, pulled: Pull, nonzero: Flags) -> Body:
    """Return a backward program that also takes, and does not read, the cotangents that are zero."""
    if all(nonzero):
        return backward
    count = len(backward.inputs) - sum(nonzero)
    read, tensors, cotangents = iter(backward.inputs[count:]), dict(backward.tensors), list[int]()
    for flag, result in zip(nonzero, pulled.results, strict=True):
        cotangents.append(next(read) if flag else max(tensors, default=-1) + 1)
        tensors.setdefault(cotangents[-1], tensor_type(tuple(result.shape), result.dtype))
    return Body((*backward.inputs[:count], *cotangents), backward.outputs, backward.equations, tensors)


def served_operands(rule: VjpRule, results: int) -> tuple[Mapping[int, frozenset[int]], Mapping[int, frozenset[int]]]:
    """Return the operands whose cotangents alone depend on each variable of the forward and of the backward program.

    Those on which the values of the `results` depend are left out of the former.
    """
    operands = (frozenset({k}) for k, flag in enumerate(rule.floating) if flag)
    backward = _dependents(rule.backward, operands)
    residuals = (backward.get(v, frozenset[int]()) for v in rule.backward.inputs)
    forward = _dependents(rule.forward, (*[frozenset({VALUE})] * results, *residuals))
    return {v: served for v, served in forward.items() if VALUE not in served}, backward


def _dependents(body: Body, ends: Iterable[frozenset[int]]) -> Mapping[int, frozenset[int]]:
    """Return for each variable of a program the union of the `ends`, one for each result, of the results that depend on it."""
    dependents: dict[int, frozenset[int]] = {}
    for a, end in zip(body.outputs, ends, strict=False):
        if isinstance(a, int):
            dependents[a] = dependents.get(a, frozenset()) | end
    for e in reversed(body.equations):
        users = frozenset[int]().union(*(dependents.get(v, frozenset()) for v in e.results))
        for a in e.operands:
            if isinstance(a, int) and users:
                dependents[a] = dependents.get(a, frozenset()) | users
    return dependents


@dataclass(frozen=True, eq=False)
class Pull:
    """A call differentiated by some of its operands.

    Attributes:
        equation: the call.
        floating: for each operand whether the call is differentiated by it.
        forward: primals → (results, residuals).
        pullback: the backward part.
        calls: the calls with rules of their own in the forward part, which `forward` has without their rules.
    """

    equation: Equation
    floating: Flags
    forward: Body
    pullback: EquationPullback
    calls: tuple[core.JaxprEqn, ...]

    @property
    def results(self) -> list[ShapedArray]:
        """The types of the results."""
        return self.pullback.results


@lru_cache(maxsize=1024)
def backward_body(pulled: Pull, nonzero: Flags) -> Body:
    """Return the program (residuals, cotangents of the `nonzero` results) → cotangents of the `floating` primals.

    Args:
        pulled: the differentiated call.
        nonzero: for each result whether it has a cotangent; the cotangents of the others are zero.
    """
    return close(first_order(_backward(pulled, nonzero)))


def backward_calls(pulled: Pull, nonzero: Flags) -> tuple[core.JaxprEqn, ...]:
    """Return the calls with rules of their own in the backward part, which `backward_body` has without their rules."""
    return ruled_calls(_backward(pulled, nonzero))


@_remembered
def _backward(pulled: Pull, nonzero: Flags) -> core.ClosedJaxpr:
    def run(residuals: Any, cotangents: Any) -> Any:
        return pulled.pullback.backward(nonzero, residuals, cotangents)

    types = pulled.pullback.residuals, chosen_of(nonzero, pulled.results)
    structs = ([jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals] for avals in types)
    return _traced(pulled.equation, run, *structs)


@_remembered
def pull(equation: Equation, floating: Flags) -> Pull:
    """Differentiate a call by its `floating` operands."""
    pullback = EquationPullback(as_function(equation), floating)
    program = _traced(equation, pullback.forward, *_abstract_operands(equation))
    return Pull(equation, floating, close(first_order(program)), pullback, ruled_calls(program))
