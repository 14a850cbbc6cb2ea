"""Constants that no device can compute a part of, such as a `jnp.linspace`, which joins its last element to the others.

Beside such an array nothing could be partitioned along it. Evaluated, it is an array of which every device takes its part. Only
numbers that are moved, compared, added and multiplied are evaluated: these have the same bits on every host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.graph import CONSTRAIN
from unity.pcg.ir.program import HOISTED, Atom, Body, Equation, Literal
from unity.pcg.jaxprs.jaxprs import NESTING
from unity.pcg.jaxprs.trace_contexts import precision_of, unset
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import Slot, facts_of

EXACT = {  # beside those that move values
    "add", "concatenate", "div", "eq", "ge", "gt", "iota", "le", "lt", "max", "min", "mul", "ne", "neg", "pad", "select_n", "slice",
    "sub",
}  # fmt: skip


def with_folded_constants(body: Body) -> Body:
    """Return a body in which small constants are literals if some dimension of theirs could not be partitioned."""
    producers = {v: body.equations[i] for v, i in constants(body).items()}
    folded = {v: _evaluated(body, v, producers) for v in _indivisible(body, producers)}
    if not folded:
        return body

    def read(e: Equation) -> Equation:
        return e.reading(tuple(folded.get(a, a) if isinstance(a, int) else a for a in e.operands))

    equations = tuple(read(e) if not folded.keys().isdisjoint(_variables(e)) else e for e in body.equations)
    return used(replace(body, equations=equations))


def _variables(equation: Equation) -> list[int]:
    return [a for a in equation.operands if isinstance(a, int)]


def _indivisible(body: Body, producers: Mapping[int, Equation]) -> Iterator[int]:
    """Yield small constants with a dimension that their equation cannot partition, but results and operands of nested programs."""
    whole = (_variables(e) for e in body.equations if e.name in (*NESTING, CONSTRAIN))
    excluded = {a for a in body.outputs if isinstance(a, int)}.union(*whole)
    for v, e in producers.items():
        tensor = body.tensors[v]
        if v in excluded or not _is_plain(body, e, producers):
            continue
        spec, position = spec_of(body, e), e.results.index(v)
        places = [f.results[position] for f in spec.factors] if spec is not None else []
        divisible = {place.dim for place in places if isinstance(place, Slot)}
        if any(n > 1 and d not in divisible for d, n in enumerate(tensor.shape)):
            yield v


def _is_plain(body: Body, equation: Equation, producers: Mapping[int, Equation]) -> bool:
    """Return whether a constant is computed exactly, by small arrays of numbers alone."""
    tensors = [body.tensors[v] for v in equation.results]
    exact = equation.name in EXACT or facts_of(equation.name).moves
    numbers = all(jnp.issubdtype(t.dtype, np.number) or t.dtype == bool for t in tensors)
    if not (exact and numbers and all(t.nbytes <= HOISTED for t in tensors)):
        return False
    return all(_is_plain(body, producers[a], producers) for a in _variables(equation))


def _evaluated(body: Body, variable: int, producers: Mapping[int, Equation]) -> Literal:
    """Return the value of a constant."""

    def value(atom: Atom) -> Any:
        if isinstance(atom, Literal):
            return jnp.asarray(atom.value, atom.tensor.dtype)
        e = producers[atom]
        results = e.primitive.bind(*map(value, e.operands), **e.params)
        return results[e.results.index(atom)] if e.primitive.multiple_results else results

    with unset(), precision_of(body.tensors.values()), jax.debug_nans(False), jax.ensure_compile_time_eval():
        return Literal(np.asarray(value(variable)), body.tensors[variable])
