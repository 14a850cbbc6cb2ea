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

from unity.pcg.ir.program import Body, close, params_key
from unity.pcg.operators.promised_reads import promised
from unity.pcg.types.factors import TABLE
from unity.pcg.types.parallel_type import Shape
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import applications

Mode = lax.GatherScatterMode
SAID = ("mode", "fill_value")  # the parameters of a look-up about indices out of bounds


def manner(mode: Mode) -> str:
    """Return the parameters of look-ups in a mode that tell how they treat indices out of bounds, as text."""
    return params_key(dict(zip(SAID, (mode, None), strict=True)))


CLIPPED, PROMISED = manner(Mode.CLIP), manner(Mode.PROMISE_IN_BOUNDS)


@lru_cache(maxsize=4096)
def counts(rule: Rule) -> bool:
    """Return whether a rule computes with indices, which is correct only for look-ups that clamp."""
    return any(t.operator in ("within", "behind") for t in applications(rule.sides))


@TABLE.clears
@lru_cache(maxsize=4096)
def program(rows: Shape, dtype: str, ids: Shape, kind: str, size: int) -> Body:
    """Return `promised` as a program, for rows and indices of these shapes and types and a table of `size` rows."""
    structs = jax.ShapeDtypeStruct(rows, dtype), jax.ShapeDtypeStruct(ids, kind)
    return close(jax.make_jaxpr(lambda x, i: promised(x, i, size))(*structs))
