"""Nested programs: calls, branches and loops whose predicates are concrete."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any

import jax
import numpy as np
from jax.extend import core

from unity.pcg.ir.program import INLINED
from unity.pcg.jaxprs.scan_operands import constants_and_carry
from unity.pcg.types.parallel_type import Shape
from unity.verify.semantics.primitives.core import Application, Run, Value, evaluate, floating, meaning
from unity.verify.semantics.primitives.elementwise import chosen

MOST_STEPS = 10_000


def closed(program: Any) -> core.ClosedJaxpr:
    """A nested program, its constants with it."""
    return program if isinstance(program, core.ClosedJaxpr) else core.ClosedJaxpr(program, ())


CUSTOM = "custom_jvp_call"
CALLS = (*sorted(INLINED), CUSTOM, "custom_vjp_call", "custom_vjp_call_jaxpr", "remat2", "remat", "checkpoint")


@meaning(*CALLS)
def call(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """What the body computes."""
    program = next(app.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if k in app.params)
    if app.name == CUSTOM and str(program) == _gaussian(app.operands[0].shape, app.operands[0].dtype):
        (x,) = (run.lift(v) for v in values)
        return [Value(run.domain.function("exp", run.domain.neg(run.domain.mul(x, x))), False)]
    return evaluate(run, closed(program), values)


@lru_cache(maxsize=1024)
def _gaussian(shape: Shape, dtype: Any) -> str | None:
    """The program by which newer JAX computes exp(-x²) in the derivatives of error functions, in two parts that are rounded apart.

    Bits are masked in it, of which no ring knows anything: it is known by its text. None in older JAX, which has no such program.
    """
    if not floating(dtype):
        return None
    x = jax.ShapeDtypeStruct(shape, dtype)
    derivative = jax.make_jaxpr(lambda x, t: jax.jvp(jax.lax.erf, (x,), (t,))[1])(x, x)
    return next((str(e.params["call_jaxpr"]) for e in derivative.eqns if e.primitive.name == CUSTOM), None)


@meaning("custom_linear_solve")
def linear_solve(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """What the solver computes; that it solves is its own affair."""
    lengths, programs = app.params["const_lengths"], app.params["jaxprs"]
    before = lengths.matvec + lengths.vecmat
    right = values[before + lengths.solve + lengths.transpose_solve :]
    return evaluate(run, closed(programs.solve), [*values[before : before + lengths.solve], *right])


@meaning("platform_index")
def platform(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """The default platform's branch, where there is one: all branches compute the same."""
    names = list(app.params["platforms"])
    return [Value(np.full((1,) * run.lead, names.index(None) if None in names else 0, np.int32), True)]


def where(run: Run, condition: Any, yes: Value, no: Value) -> Value:
    """`condition` is `[*lead]`, concrete; that of a loop under `vmap` has the first local dimensions too."""
    _, (a, b) = run.together([yes, no])
    condition = condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim))
    return Value(np.where(condition, a, b), yes.known and no.known)


@meaning("cond")
def branch(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Index and operands. Where devices disagree, each has its own branch's results."""
    index, *operands = values
    branches = app.params["branches"]
    if not index.known:
        every = [evaluate(run, closed(b), operands) for b in branches]
        results = zip(*every, strict=True)
        return [Value(_spread(run, index, [run.lift(v) for v in cases]), False) for cases in results]
    at = np.clip(index.array.astype(np.int64), 0, len(branches) - 1)
    taken = [int(k) for k in np.unique(at)]
    found = {k: evaluate(run, closed(branches[k]), operands) for k in taken}
    return [
        reduce(lambda old, k: where(run, at == k, found[k][i], old), taken[1:], found[taken[0]][i]) for i in range(len(app.results))
    ]


def _spread(run: Run, index: Value, cases: list) -> Any:
    """A choice by an element."""
    rank = max(c.ndim for c in cases) - run.lead
    return chosen(run.domain, index.array.reshape(index.array.shape + (1,) * rank), cases)


@meaning("while")
def loop(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """As long as the predicate holds; where it does not, what is carried stays."""
    params = app.params
    a, b = params["cond_nconsts"], params["body_nconsts"]
    outside, inside, carry = list(values[:a]), list(values[a : a + b]), list(values[a + b :])
    going: Any = np.ones((1,) * run.lead, bool)
    for _ in range(MOST_STEPS):
        (more,) = evaluate(run, params["cond_jaxpr"], outside + carry)
        if not more.known:
            raise app.refuse("its predicate depends on floating values")
        going = going & more.array
        if not going.any():
            return carry
        new = evaluate(run, params["body_jaxpr"], inside + carry)
        carry = new if going.all() else [where(run, going, n, c) for n, c in zip(new, carry, strict=True)]
    raise app.refuse(f"more than {MOST_STEPS} steps")


@meaning("scan")
def scan(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Constants, what is carried, and what each step takes a slice of."""
    params = app.params
    (c, k), length = constants_and_carry(params), params["length"]
    consts, carry, stacked = list(values[:c]), list(values[c : c + k]), values[c + k :]
    made: list[list[Value]] = []
    for step in range(length)[:: -1 if params["reverse"] else 1]:
        xs = [Value(np.take(v.array, step, run.lead), v.known) for v in stacked]
        out = evaluate(run, params["jaxpr"], [*consts, *carry, *xs])
        carry = out[:k]
        made.append(out[k:])
    made = made[:: -1 if params["reverse"] else 1]
    return [*carry, *(_stacked(run, [step[i] for step in made], app.results[k + i]) for i in range(len(app.results) - k))]


def _stacked(run: Run, steps: list[Value], aval: Any) -> Value:
    if not steps:
        return run.constant(np.zeros(aval.shape, aval.dtype), aval)
    _, arrays = run.together(steps)
    return Value(np.stack(np.broadcast_arrays(*arrays), run.lead), all(v.known for v in steps))
