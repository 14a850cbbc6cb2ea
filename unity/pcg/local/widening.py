"""Operators and collectives on narrow pieces, some of which are partial sums or have cotangents that are.

`unity.pcg.types.accumulation` defines in which type a device holds a piece. Local programs are evaluated here with partial sums in
their accumulator type: products take narrow operands and return wide results, as hardware does, and all else is computed wide. JAX
gives every cotangent the type of its value, and the transpose of a narrow operator is narrow. The derivative is therefore that of
the narrow program, evaluated with wide cotangents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from unity.pcg.ir.program import INLINED
from unity.pcg.jaxprs.jaxprs import LINEAR_SOLVE, NESTING, Program, called, floating
from unity.pcg.jaxprs.product_precision import of_swapped_operands
from unity.pcg.operators.layout import Layout, PlacedTensor
from unity.pcg.types.accumulation import WIDE, accumulator, is_wide_sum, narrow
from unity.pcg.types.varying_axes import vary, varying

Arrays = Sequence[Any]
UNDIFFERENTIABLE = (NotImplementedError, TypeError, ValueError)  # JAX raises one if an operand has no derivative


class SummandRole(IntEnum):
    """The role of a value in the partial sums that are computed from it."""

    NONE = 0  # no summand depends on it
    FACTOR = 1  # a narrow number from which summands are computed
    PARTIAL = 2  # a partial sum, which must not be rounded


Marked = tuple[Any, SummandRole]


def widens(layout: Layout) -> bool:
    """Return whether an application has narrow operands or results that are partial sums, or whose cotangents are."""
    return any(_is_wide(p, "SR") for p in layout.operands + layout.results)


Local = Callable[[list], list]


def applied(
    local: Local,
    operands: Arrays,
    layout: Layout,
    exact: bool = False,
    value: Local | None = None,
    guard: Callable[[Arrays], list[Any]] = list,
) -> list:
    """Return the results of an operator on pieces, with operands and results in the types in which devices hold them.

    Args:
        local: the operator's local program, on pieces of the tensors' own element types.
        operands: the pieces.
        layout: their layout.
        exact: whether all but one of the summands of each partial sum are zero, so that the narrow sum is exact.
        value: a program on pieces as they are stored that computes the results; by default they follow from the local program.
        guard: the identity on operands, which may refuse a second derivative.
    """
    active, refused = _differentiable(local, _plain(operands, layout))

    @jax.custom_vjp
    def call(*pieces: Any) -> list:
        return evaluate(*pieces)[0]

    def evaluate(*pieces: Any) -> tuple[list, list]:
        """Return the results, and the operands without needless width."""
        values = [x if _is_wide(p, "S") else x.astype(p.dtype) for x, p in zip(pieces, layout.operands, strict=True)]
        return _wide_results(local, values, layout, exact) if value is None else value(list(pieces)), values

    def backward(values: list, cotangents: list) -> tuple:
        values = guard(values)
        plain = _plain(values, layout)
        real = [(g, p) for g, p in zip(cotangents, layout.results, strict=True) if floating(p)]

        def pulled(plain: list, narrow_cotangents: list) -> tuple:
            run = _function_of(local, plain, active)
            return jax.vjp(run, *(plain[k] for k in active))[1](narrow_cotangents)

        marked = [
            (x, SummandRole.PARTIAL if _is_wide(p, "S") else SummandRole.NONE) for x, p in zip(values, layout.operands, strict=True)
        ]
        rounded = [g.astype(p.dtype) for g, p in real]
        for (g, p), own in zip(real, rounded, strict=True):
            marked.append((g, SummandRole.PARTIAL) if _is_wide(p, "R") else (own, SummandRole.FACTOR))
        results = iter(evaluated(jax.make_jaxpr(pulled)(plain, rounded), marked))
        return tuple(next(results)[0].astype(p.storage_dtype) if k in active else None for k, p in enumerate(layout.operands))

    def argument(k: int, x: Any) -> Any:
        if k in refused:
            return _refusing(x, refused[k])
        return x if k in active else lax.stop_gradient(x)  # JAX differentiates any call with a rule, which a loop may refuse

    call.defvjp(lambda *pieces: evaluate(*guard(pieces)), backward)
    return call(*(argument(k, x) for k, x in enumerate(operands)))


def _plain(values: Arrays, layout: Layout) -> list:
    """Return operands in the tensors' own element types."""
    return [x.astype(p.dtype) for x, p in zip(values, layout.operands, strict=True)]


def _wide_results(local: Local, values: Arrays, layout: Layout, exact: bool) -> list:
    """Return the results of `applied`, with partial sums in their accumulator type."""
    plain = _plain(values, layout)
    if any(_is_wide(p, "S") for p in layout.operands) or (not exact and any(_is_wide(p, "S") for p in layout.results)):
        marks = [SummandRole.PARTIAL if _is_wide(p, "S") else SummandRole.FACTOR for p in layout.operands]
        out = [x for x, _ in evaluated(jax.make_jaxpr(local)(plain), list(zip(values, marks, strict=True)))]
    else:
        out = local(plain)
    return [x.astype(p.storage_dtype) for x, p in zip(out, layout.results, strict=True)]


def _function_of(local: Local, plain: Arrays, positions: Sequence[int]) -> Callable[..., list]:
    """Return an operator's floating-point results as a function of the operands at some positions."""

    def run(*arguments: Any) -> list:
        changed = dict(zip(positions, arguments, strict=True))
        return [y for y in local([changed.get(k, x) for k, x in enumerate(plain)]) if floating(y)]

    return run


def _differentiable(local: Local, plain: Arrays) -> tuple[list[int], dict[int, Exception]]:
    """Return the operands by which an operator has a nonzero derivative, and JAX's errors for those by which it has none."""
    floats = [k for k, x in enumerate(plain) if floating(x)]
    try:
        return (floats if _has_derivative(local, plain, floats) else []), {}
    except UNDIFFERENTIABLE:
        active, refused = list[int](), dict[int, Exception]()
    for k in floats:
        try:
            active += [k] if _has_derivative(local, plain, [k]) else []
        except UNDIFFERENTIABLE as error:
            refused[k] = error
    return active, refused


def _has_derivative(local: Local, plain: Arrays, positions: Sequence[int]) -> bool:
    """Return whether any result of an operator depends on the tangents of the operands at some positions."""
    values, run = [plain[k] for k in positions], _function_of(local, plain, positions)
    jaxpr = jax.make_jaxpr(lambda xs, ts: jax.jvp(run, tuple(xs), tuple(ts))[1])(values, values).jaxpr
    active = set(jaxpr.invars[len(positions) :])
    for eqn in jaxpr.eqns:
        if any(a in active for a in eqn.invars if not isinstance(a, core.Literal)):
            active.update(eqn.outvars)
    return any(a in active for a in jaxpr.outvars if not isinstance(a, core.Literal))


def _refusing(x: Any, error: Exception) -> Any:
    """Wrap an operand that has no derivative, so that differentiating by it, and only that, raises `error`."""

    @jax.custom_jvp
    def same(x: Any) -> Any:
        return x

    @same.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        raise error

    return same(x)


def _is_wide(placed: PlacedTensor, kinds: str) -> bool:
    """Return whether a tensor is a wide partial sum (`kinds` has "S"), or its cotangent is ("R")."""
    return is_wide_sum(placed.dtype, placed.type, placed.axes, kinds)


def evaluated(closed: core.ClosedJaxpr, values: Sequence[Marked]) -> list[Marked]:
    """Return the results of a narrow program, evaluated with wide partial sums."""
    env: dict[Any, Marked] = {v: (c, SummandRole.NONE) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True)}
    env.update(zip(closed.jaxpr.invars, values, strict=True))

    def read(atom: Any) -> Marked:
        return (atom.val, SummandRole.NONE) if isinstance(atom, core.Literal) else env[atom]

    for eqn in _without_transposed_products(closed.jaxpr):
        operands = [read(a) for a in eqn.invars]
        mark = max((m for a, (_, m) in zip(eqn.invars, operands, strict=True) if floating(_type(a))), default=SummandRole.NONE)
        env.update(zip(eqn.outvars, _results(eqn, operands, mark), strict=True))
    return [read(a) for a in closed.jaxpr.outvars]


def _without_transposed_products(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """Return the equations of a program, with transposes of products folded into the products, whose operands are swapped.

    JAX transposes the gradients of weights so. XLA folds the transpose into the product itself, and its CPU runtime lacks that
    product of narrow numbers with a wide result: the device that reaches it fails, and the others wait in the next collective.
    """
    makers: dict[Any, core.JaxprEqn] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    reads: Counter[Any] = Counter(
        a for atoms in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars) for a in atoms if isinstance(a, core.Var)
    )
    replaced: dict[int, core.JaxprEqn | None] = {}  # by id(equation)
    for eqn in jaxpr.eqns:
        operand = eqn.invars[0] if eqn.primitive.name == "transpose" else None
        product = makers.get(operand) if isinstance(operand, core.Var) else None
        if product is None or product.primitive.name != "dot_general" or reads[operand] > 1:
            continue
        a, b = product.invars
        (summed_a, summed_b), (batch_a, batch_b) = product.params["dimension_numbers"]
        shared, own = len(batch_a), _type(a).ndim - len(summed_a)
        order = (*range(shared), *range(own, _type(product.outvars[0]).ndim), *range(shared, own))
        if narrow(_type(product.outvars[0]).dtype) and tuple(eqn.params["permutation"]) == order:
            params = product.params | {
                "dimension_numbers": ((summed_b, summed_a), (batch_b, batch_a)),
                "precision": of_swapped_operands(product.params["precision"]),
            }
            replaced[id(eqn)] = product.replace(invars=[b, a], outvars=eqn.outvars, params=params)
            replaced[id(product)] = None
    equations = (replaced.get(id(eqn), eqn) for eqn in jaxpr.eqns)
    return [eqn for eqn in equations if eqn is not None]


def _results(eqn: core.JaxprEqn, operands: Sequence[Marked], mark: SummandRole) -> list[Marked]:
    """Return the results of an equation; `mark` is the greatest role of its floating-point operands."""
    if eqn.primitive.name in INLINED:
        program = called(eqn.params)
        return evaluated(program if isinstance(program, core.ClosedJaxpr) else core.ClosedJaxpr(program, ()), operands)
    values = [x for x, _ in operands]
    if mark == SummandRole.NONE:
        return [(x, SummandRole.NONE) for x in _bound(eqn, values)]
    solved = eqn.primitive.name == LINEAR_SOLVE and mark == SummandRole.PARTIAL  # it and its programs are linear in the summands
    if not solved and (eqn.primitive.name in NESTING or called(eqn.params) is not None):
        results = _bound(eqn, [_rounded(x, a) for x, a in zip(values, eqn.invars, strict=True)])
    elif "mantissa_bits" in eqn.params and mark == SummandRole.PARTIAL:
        results = values  # a rounding, which has to come after the sum
    elif "new_dtype" in eqn.params:
        results = [values[0].astype(accumulator(eqn.params["new_dtype"]))]
    elif "preferred_element_type" in eqn.params and mark == SummandRole.FACTOR:
        own = [_rounded(x, a) for x, a in zip(values, eqn.invars, strict=True)]
        results = eqn.primitive.bind(*own, **eqn.params | _wide_result(eqn))
    else:
        wide = [x.astype(WIDE) if narrow(_type(a).dtype) else x for x, a in zip(map(jnp.asarray, values), eqn.invars, strict=True)]
        params = {k: _widened(v) for k, v in eqn.params.items()} | _wide_result(eqn)
        results = eqn.primitive.bind(*wide, **params)
    results = results if isinstance(results, list | tuple) else [results]
    return [
        (x.astype(accumulator(_type(v).dtype)), SummandRole.PARTIAL) if floating(_type(v)) else (x, SummandRole.NONE)
        for x, v in zip(results, eqn.outvars, strict=True)
    ]


def _wide_result(eqn: core.JaxprEqn) -> dict[str, Any]:
    """Return the parameter that makes a narrow product return its wide result."""
    is_narrow_product = "preferred_element_type" in eqn.params and narrow(_type(eqn.outvars[0]).dtype)
    return {"preferred_element_type": WIDE} if is_narrow_product else {}


def _type(atom: Any) -> Any:
    """Return the type of a variable or a literal of a jaxpr."""
    return atom.aval


def _rounded(x: Any, atom: Any) -> Any:
    return x.astype(_type(atom).dtype) if narrow(_type(atom).dtype) else x


def _bound(eqn: core.JaxprEqn, values: Arrays) -> list:
    """Return the results of an equation, unchanged."""
    if eqn.primitive.name not in NESTING and called(eqn.params) is None:
        results = eqn.primitive.bind(*values, **eqn.params)
        return list(results) if eqn.primitive.multiple_results else [results]
    operands: list[Any] = [core.Var(_type(v)) for v in eqn.invars]
    unnamed = core.DebugInfo(eqn.primitive.name, "", None, None)
    jaxpr = core.Jaxpr((), operands, eqn.outvars, [eqn.replace(invars=operands)], debug_info=unnamed)
    return list(core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*values))


def _widened(program: Any) -> Any:
    """Widen the programs in a parameter, such as the function of a reduction. Return any other parameter unchanged."""
    if isinstance(program, tuple) and any(isinstance(p, Program) for p in program):
        return getattr(program, "_make", tuple)(map(_widened, program))
    if not isinstance(program, Program):
        return program
    closed = program if isinstance(program, core.ClosedJaxpr) else core.ClosedJaxpr(program, ())
    elements = [_type(v).update(dtype=accumulator(_type(v).dtype)) for v in closed.jaxpr.invars]
    wide = jax.make_jaxpr(lambda *xs: [y for y, _ in evaluated(closed, [(x, SummandRole.PARTIAL) for x in xs])])(*elements)
    return wide if isinstance(program, core.ClosedJaxpr) else wide.jaxpr


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Round a wide piece to a narrow type, but not its cotangent, which may be a partial sum."""
    return x.astype(dtype).astype(x.dtype)


rounded.defvjp(lambda x, dtype: (rounded(x, dtype), None), lambda dtype, _, g: (g,))


def sent(collective: Callable[[Any], Any], x: Any, there: Any, back: Any, own: Any, result: Any, whole: bool) -> Any:
    """Run a collective on a narrow piece, in one type forward and in another backward.

    Args:
        collective: the collective, a linear function.
        x: the piece.
        there, back: the types in which the value and its cotangent travel.
        own: the tensor's type, to which a whole result is rounded.
        result: the type in which the result is stored.
        whole: whether the result is a whole value, not a partial sum.
    """

    shape, stored, names = x.shape, x.dtype, varying(x)

    @jax.custom_vjp
    def call(x: Any) -> Any:
        moved = collective(x.astype(there))
        return (moved.astype(own) if whole else moved).astype(result)

    def backward(_: None, g: Any) -> tuple[Any]:
        (cotangent,) = jax.vjp(collective, vary(jnp.zeros(shape, back), names))[1](g.astype(back))  # it may have a custom rule
        return (cotangent.astype(stored),)

    call.defvjp(lambda x: (call(x), None), backward)
    return call(x)
