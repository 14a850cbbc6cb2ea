"""Programs that compute some of their results alone, and read what these depend on alone, in nested programs too.

    remat(step)(x, i)  =  x', i'        i'  =  remat(step')(i)        where step' computes i + 1 from i

A call, a conditional or a scan is a single equation, but its results may depend on different operands. These are followed through
its program, result by result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
from jax.extend import core

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.jaxprs import BRANCHED, REMATERIALIZED, RULED, SCANNED
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.propagation.nested.programs import branches, nested_body
from unity.transforms.loops.scan_parameters import with_step


def with_results(body: Body, numbers: Sequence[int]) -> Body:
    """Return a program with these results alone, in this order. It keeps all inputs."""
    outputs = tuple(body.outputs[k] for k in numbers)
    live = {a for a in outputs if isinstance(a, int)}
    equations = list[Equation]()
    for e in reversed(body.equations):
        live_results = [k for k, v in enumerate(e.results) if v in live]
        if live_results:
            e = narrowed(e, live_results)
            live.update(a for a in e.operands if isinstance(a, int))
            equations.append(e)
    return used(replace(body, outputs=outputs, equations=tuple(reversed(equations))))


def inputs_read(body: Body) -> list[int]:
    """Return the inputs, by position, that a program reads."""
    atoms = {a for a in (*body.outputs, *(a for e in body.equations for a in e.operands)) if isinstance(a, int)}
    return [p for p, v in enumerate(body.inputs) if v in atoms]


def narrowed(e: Equation, wanted: Sequence[int]) -> Equation:
    """Return an equation that computes at least the results `wanted` of another, by number."""
    if e.name in REMATERIALIZED:
        return _call(e, wanted, e.primitive, e.params)
    if e.name in RULED:
        # without a gradient its rule has no part in a result; with one, the rule may relate all operands
        is_undifferentiated = not any(t.floating for t in (nested_body(e).tensor(nested_body(e).outputs[k]) for k in wanted))
        return _call(e, wanted, *_checkpoint()) if is_undifferentiated else e
    if e.name in SCANNED:
        return _scan(e, wanted)
    return _conditional(e, wanted) if e.name in BRANCHED else e


def _call(e: Equation, wanted: Sequence[int], primitive: core.Primitive, params: Mapping[str, Any]) -> Equation:
    part = with_results(nested_body(e), wanted)
    places = inputs_read(part)
    if e.primitive is primitive and len(wanted) == len(e.results) and len(places) == len(e.operands):
        return e
    program = replace(part, inputs=tuple(part.inputs[p] for p in places))
    return _of(replace(e, primitive=primitive, params={**params, "jaxpr": program}, inactive=()), places, wanted)


def _conditional(e: Equation, wanted: Sequence[int]) -> Equation:
    parts = [with_results(branch, wanted) for branch in branches(e)]
    places = sorted({p for part in parts for p in inputs_read(part)})
    if len(wanted) == len(e.results) and len(places) + 1 == len(e.operands):
        return e
    programs = tuple(replace(part, inputs=tuple(part.inputs[p] for p in places)) for part in parts)
    return _of(replace(e, params={**e.params, "branches": programs}), [0, *(p + 1 for p in places)], wanted)


def _scan(e: Equation, wanted: Sequence[int]) -> Equation:
    """Narrow a scan to results, and to the carries that they depend on after any number of steps."""
    consts, carry = constants_and_carry(e.params)
    needed = sorted(wanted)
    while True:
        part = with_results(nested_body(e), needed)
        places = inputs_read(part)
        more = {p - consts for p in places if consts <= p < consts + carry}.difference(needed)
        if not more:
            break
        needed = sorted(more.union(needed))
    carried = [k for k in needed if k < carry]
    places = sorted({*places, *(consts + k for k in carried)})
    if len(needed) == len(e.results) and len(places) == len(e.operands):
        return e
    step = replace(part, inputs=tuple(part.inputs[p] for p in places))
    params = with_step(e.params, step, sum(p < consts for p in places), len(carried))
    return _of(replace(e, params=params), places, needed)


def _of(e: Equation, places: Sequence[int], numbers: Sequence[int]) -> Equation:
    operands, results = (tuple(of[k] for k in some) for of, some in ((e.operands, places), (e.results, numbers)))
    return replace(e, operands=operands, results=results, origin=None)


@cache
def _checkpoint() -> tuple[core.Primitive, Mapping[str, Any]]:
    """Return the primitive and the parameters of `jax.checkpoint` in the installed version of JAX."""
    (eqn,) = jax.make_jaxpr(jax.checkpoint(lambda x: x * x, prevent_cse=False))(1.0).eqns
    return eqn.primitive, eqn.params
