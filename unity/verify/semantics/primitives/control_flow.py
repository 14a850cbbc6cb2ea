"""Calls, branches, and loops whose predicates are concrete: primitives that run nested programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any

import jax
import numpy as np
from jax.extend import core

from unity.pcg.ir.program import INLINED
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.types.parallel_type import Shape
from unity.verify.semantics.domains import Array
from unity.verify.semantics.primitives.core import (
    InterpreterRun,
    PrimitiveCall,
    StackedValue,
    evaluate,
    is_inexact,
    meaning,
)
from unity.verify.semantics.primitives.elementwise import select_by_element

MOST_STEPS = 10_000
CUSTOM = "custom_jvp_call"
CALLS = (*sorted(INLINED), CUSTOM, "custom_vjp_call", "custom_vjp_call_jaxpr", "remat2", "remat", "checkpoint")


def closed(program: Any) -> core.ClosedJaxpr:
    """Return a nested program as a closed one."""
    return program if isinstance(program, core.ClosedJaxpr) else core.ClosedJaxpr(program, ())


@meaning(*CALLS)
def call_program(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The results of the program that is called."""
    program = next(call.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if k in call.params)
    if call.name == CUSTOM and str(program) == _gaussian_program(call.operands[0].shape, call.operands[0].dtype):
        (x,) = (run.lift(v) for v in values)
        return [StackedValue(run.domain.function("exp", run.domain.neg(run.domain.mul(x, x))), False)]
    return evaluate(run, closed(program), values)


@lru_cache(maxsize=1024)
def _gaussian_program(shape: Shape, dtype: Any) -> str | None:
    """Return the text of the program by which newer JAX computes exp(-x²) in the derivatives of error functions.

    That program masks bits to split x into two parts, which has no meaning in a ring, so it is recognized by its text. Older JAX
    has no such program; the result is then None.
    """
    if not is_inexact(dtype):
        return None
    x = jax.ShapeDtypeStruct(shape, dtype)
    derivative = jax.make_jaxpr(lambda x, t: jax.jvp(jax.lax.erf, (x,), (t,))[1])(x, x)
    return next((str(e.params["call_jaxpr"]) for e in derivative.eqns if e.primitive.name == CUSTOM), None)


@meaning("custom_linear_solve")
def linear_solve(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The result of the user's solver, which is trusted to solve the system."""
    lengths, programs = call.params["const_lengths"], call.params["jaxprs"]
    before = lengths.matvec + lengths.vecmat
    right = values[before + lengths.solve + lengths.transpose_solve :]
    return evaluate(run, closed(programs.solve), [*values[before : before + lengths.solve], *right])


@meaning("platform_index")
def platform_index(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The index of the default platform's branch, or of the first: all branches compute the same."""
    names = list(call.params["platforms"])
    return [StackedValue(np.full((1,) * run.lead, names.index(None) if None in names else 0, np.int32), True)]


def where(run: InterpreterRun, condition: Array, yes: StackedValue, no: StackedValue) -> StackedValue:
    """Select by a concrete condition `[*lead]`. The condition of a loop under `vmap` also has the first local dimensions."""
    _, (a, b) = run.together([yes, no])
    condition = condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim))
    return StackedValue(np.where(condition, a, b), yes.known and no.known)


@meaning("cond")
def branch(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The results of the branch whose index is the first operand. Devices with different indices take different branches."""
    index, *operands = values
    branches = call.params["branches"]
    if not index.known:
        results = zip(*(evaluate(run, closed(b), operands) for b in branches), strict=True)
        return [StackedValue(_select_case(run, index, [run.lift(v) for v in cases]), False) for cases in results]
    at = np.clip(index.array.astype(np.int64), 0, len(branches) - 1)
    used = [int(k) for k in np.unique(at)]
    results_of = {k: evaluate(run, closed(branches[k]), operands) for k in used}
    return [
        reduce(lambda old, k: where(run, at == k, results_of[k][i], old), used[1:], results_of[used[0]][i])
        for i in range(len(call.results))
    ]


def _select_case(run: InterpreterRun, index: StackedValue, cases: list[Array]) -> Array:
    """Select a branch's result by an index that is an element."""
    rank = max(c.ndim for c in cases) - run.lead
    return select_by_element(run.domain, index.array.reshape(index.array.shape + (1,) * rank), cases)


@meaning("while")
def while_loop(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The carry after the last step. Where the predicate no longer holds, the carry stays as it is."""
    params = call.params
    a, b = params["cond_nconsts"], params["body_nconsts"]
    cond_constants, body_constants, carry = list(values[:a]), list(values[a : a + b]), list(values[a + b :])
    active: Any = np.ones((1,) * run.lead, bool)
    for _ in range(MOST_STEPS):
        (predicate,) = evaluate(run, params["cond_jaxpr"], cond_constants + carry)
        if not predicate.known:
            raise call.refuse("its predicate depends on floating values")
        active = active & predicate.array
        if not active.any():
            return carry
        new = evaluate(run, params["body_jaxpr"], body_constants + carry)
        carry = new if active.all() else [where(run, active, n, c) for n, c in zip(new, carry, strict=True)]
    raise call.refuse(f"it runs more than {MOST_STEPS} steps")


@meaning("scan")
def scan(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The last carry, and the stacked results of all steps. A step takes constants, the carry, a slice of each other operand."""
    params = call.params
    (c, k), length = constants_and_carry(params), params["length"]
    constants, carry, stacked = list(values[:c]), list(values[c : c + k]), values[c + k :]
    slices: list[list[StackedValue]] = []
    for step in range(length)[:: -1 if params["reverse"] else 1]:
        xs = [StackedValue(np.take(v.array, step, run.lead), v.known) for v in stacked]
        results = evaluate(run, params["jaxpr"], [*constants, *carry, *xs])
        carry = results[:k]
        slices.append(results[k:])
    slices = slices[:: -1 if params["reverse"] else 1]
    return [*carry, *(_stacked(run, [step[i] for step in slices], call.results[k + i]) for i in range(len(call.results) - k))]


def _stacked(run: InterpreterRun, slices: list[StackedValue], aval: Any) -> StackedValue:
    """Stack the slices of all steps along a new first local dimension."""
    if not slices:
        return run.constant(np.zeros(aval.shape, aval.dtype), aval)
    _, arrays = run.together(slices)
    return StackedValue(np.stack(np.broadcast_arrays(*arrays), run.lead), all(v.known for v in slices))
