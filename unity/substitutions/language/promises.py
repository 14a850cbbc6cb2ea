"""Reduction of look-ups with the mode "promise in bounds" to look-ups that clamp, which rules may move to a joined table.

    gather[promise](table, ids)  =  promised(gather[clip](table, ids), ids, rows)

For an index out of bounds, JAX reads the nearest row and drops its gradient. In a joined table, the nearest row may belong to the
next part, and an index that is clamped beforehand gets a gradient. So rules join look-ups that clamp, and `promised` drops the
gradients of rows out of bounds afterwards.
"""

from __future__ import annotations

from functools import lru_cache

import jax
from jax import lax

from unity.pcg.ir.program import Body, params_key
from unity.pcg.ir.tracing import trace
from unity.pcg.operators.promised_reads import promised
from unity.pcg.types.factors import TABLE
from unity.pcg.types.parallel_type import Shape
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import applications

Mode = lax.GatherScatterMode
BOUNDS_PARAMETERS = ("mode", "fill_value")  # the parameters of a gather that say what an index out of bounds reads


def bounds_manner(mode: Mode) -> str:
    """Return the bounds parameters of look-ups in a mode, as text."""
    return params_key(dict(zip(BOUNDS_PARAMETERS, (mode, None), strict=True)))


CLIPPED, PROMISED = bounds_manner(Mode.CLIP), bounds_manner(Mode.PROMISE_IN_BOUNDS)


@lru_cache(maxsize=4096)
def computes_with_indices(rule: Rule) -> bool:
    """Return whether a rule computes with indices. Such a rule is correct only for look-ups that clamp."""
    return any(t.operator in ("within", "behind") for t in applications(rule.sides))


@TABLE.clears
@lru_cache(maxsize=4096)
def promised_rows(rows: Shape, dtype: str, ids: Shape, kind: str, size: int) -> Body:
    """Return the program of `promised` for rows and indices of these shapes and types, read from a table of `size` rows."""
    structs = jax.ShapeDtypeStruct(rows, dtype), jax.ShapeDtypeStruct(ids, kind)
    return trace(lambda x, i: promised(x, i, size), structs)
