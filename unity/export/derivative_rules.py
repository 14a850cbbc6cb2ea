"""Custom derivative rules of local programs as programs themselves, traced on one device's pieces inside a `shard_map`.

As `pcg/propagation/nested/derivative_rules.py` does for whole tensors, the rule's program is traced by differentiating the call. In
it, calls with rules of their own are replaced by the programs of their values. If a second derivative would need such a rule, the
exported file refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from unity.base.errors import ExportError, PlanError
from unity.export.simplification import simplified
from unity.export.tracing import LocalProgram, closed, like, traced
from unity.pcg.ir.program import Equation
from unity.pcg.jaxprs.jaxprs import CUSTOM_JVP, called, chosen_of, merged
from unity.pcg.jaxprs.pullbacks import EquationPullback
from unity.pcg.propagation.nested.derivative_rules import Flags, Unreadable, as_function, differentiable_operands
from unity.pcg.types.varying_axes import vary

MOST_TOLD_APART = 4  # operands of whose tangents a file tells all sets apart


class PartialRule(NamedTuple):
    """A rule for some tangents or cotangents: given these alone (None: it refuses), and given zeros for the others."""

    own: LocalProgram | None
    of_zeros: LocalProgram


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
        partial: for a rule that may ask where tangents, or cotangents of results, are zero (`symbolic_zeros`): what it does with
            those of some operands, or results, alone.
    """

    value: LocalProgram
    floating: tuple[bool, ...]
    forward: LocalProgram | None = None
    backward: LocalProgram | None = None
    derivative: LocalProgram | None = None
    once: bool = False
    partial: Mapping[Flags, PartialRule] = field(default_factory=dict)

    @property
    def asks(self) -> bool:
        """Whether the rule may return another derivative where a tangent or a cotangent is zero."""
        pairs = self.partial.values()
        return any(own is None or simplified(own.body).key != simplified(of_zeros.body).key for own, of_zeros in pairs)

    def each(self, all_of_them: Flags, program: LocalProgram) -> dict[Flags, LocalProgram]:
        """Return a program for each set of tangents or cotangents that the rule does not refuse: `program` for all of them."""
        return {all_of_them: program} | {some: p.own for some, p in self.partial.items() if p.own is not None}


@lru_cache(maxsize=4096)
def rule_of(equation: Equation) -> DerivativeRule:
    """Return the programs of an equation's custom rule. Must be called inside the `shard_map` that the equation was traced in.

    Raises:
        ExportError: if the rule refuses to be differentiated by all floating-point operands together.
    """
    try:
        return _jvp_rule(equation) if equation.name in CUSTOM_JVP else _vjp_rule(equation)
    except Unreadable as error:
        name = equation.name.removesuffix("_call")
        raise ExportError(equation.source, name, "its derivative rule refuses some arguments to be differentiated") from error


def _jvp_rule(equation: Equation) -> DerivativeRule:
    pieces, floating = _pieces(equation), differentiable_operands(equation)
    call, count = as_function(equation), len(pieces)

    def along(active: Flags) -> Callable[..., Any]:
        def derivative(*operands: Any) -> Any:
            others = chosen_of(active, operands[:count], False)
            run = lambda *chosen: call(*merged(active, chosen, others))  # noqa: E731
            return jax.jvp(run, tuple(chosen_of(active, operands[:count])), tuple(operands[count:]))

        return derivative

    def along_zeros(active: Flags) -> Callable[..., Any]:
        def derivative(*operands: Any) -> Any:
            chosen = iter(operands[count:])
            tangents = (next(chosen) if a else _zeros(p) for p, a, f in zip(pieces, active, floating, strict=True) if f)
            return along(floating)(*operands[:count], *tangents)

        return derivative

    partial: dict[Flags, PartialRule] = {}
    for active in _subsets(floating) if equation.params["symbolic_zeros"] else ():
        operands = [*pieces, *chosen_of(active, pieces)]
        partial[active] = PartialRule(_readable(along(active), operands), traced(along_zeros(active), operands, rule=True))
    operands = [*pieces, *chosen_of(floating, pieces)]
    program, once = traced(along(floating), operands, rule=True), _is_once(along(floating), operands)
    return DerivativeRule(_value(equation), floating, derivative=program, once=once, partial=partial)


def _vjp_rule(equation: Equation) -> DerivativeRule:
    pieces, floating = _pieces(equation), differentiable_operands(equation)
    pullback = EquationPullback(as_function(equation), floating)
    forward = traced(pullback.forward, pieces, rule=True)
    residuals, results = ([like(aval) for aval in avals] for avals in (pullback.residuals, pullback.results))
    count, everything = len(residuals), (True,) * len(results)

    def along(nonzero: Flags) -> Callable[..., Any]:
        return lambda *operands: pullback.backward(nonzero, operands[:count], operands[count:])

    def along_zeros(nonzero: Flags) -> Callable[..., Any]:
        def backward(*operands: Any) -> Any:
            zeros = [_zeros(p) for p in chosen_of(nonzero, results, False)]
            return along(everything)(*operands[:count], *merged(nonzero, operands[count:], zeros))

        return backward

    partial: dict[Flags, PartialRule] = {}
    if equation.params["symbolic_zeros"] and all(jnp.issubdtype(r.dtype, jnp.inexact) for r in results):
        for nonzero in _subsets(everything):
            operands = [*residuals, *chosen_of(nonzero, results)]
            partial[nonzero] = PartialRule(_readable(along(nonzero), operands), traced(along_zeros(nonzero), operands, rule=True))
    operands = [*residuals, *results]
    backward = traced(along(everything), operands, rule=True)
    once = _is_once(pullback.forward, pieces) or _is_once(along(everything), operands)
    return DerivativeRule(_value(equation), floating, forward, backward, once=once, partial=partial)


def _pieces(equation: Equation) -> list[jax.ShapeDtypeStruct]:
    """Return the pieces that a call takes."""
    assert equation.origin is not None
    return [like(v.aval) for v in equation.origin.invars]


def _value(equation: Equation) -> LocalProgram:
    return closed(called(equation.params))


def _readable(run: Callable[..., Any], operands: Sequence[jax.ShapeDtypeStruct]) -> LocalProgram | None:
    """Return the program of a rule, or None if it refuses what it is asked."""
    try:
        return traced(run, operands, rule=True)
    except (Unreadable, NotImplementedError):  # of a plan, and of a file
        return None


def _zeros(piece: Any) -> jax.Array:
    """Return zeros that vary as a piece does."""
    return vary(jnp.zeros(piece.shape, piece.dtype), frozenset(piece.manual_axis_type.varying))


def _subsets(flags: Flags) -> Iterator[Flags]:
    """Yield the proper subsets of the flags that a file tells apart: all if there are few, else those of one or of all but one."""
    places = [k for k, flag in enumerate(flags) if flag]
    n = len(places)
    for size in range(1, n) if n <= MOST_TOLD_APART else (1, n - 1):
        for chosen in combinations(places, size):
            yield tuple(k in chosen for k in range(len(flags)))


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
