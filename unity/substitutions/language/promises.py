"""Look-ups whose indices are promised to lie inside, as look-ups that clamp, which rules may take to another table.

    gather[promise](table, ids)  =  promised(gather[clip](table, ids), ids, rows)

JAX reads the nearest row for an index that breaks the promise, and drops its gradient. In a table that others stand behind, the
nearest row is not that of the first or the last index, and what is clamped before has a gradient. So the rule stacks look-ups that
clamp, and what is read outside loses its gradient afterwards.
"""

from __future__ import annotations

from functools import lru_cache

import jax
from jax import lax

from unity.pcg.ir.program import Body, close, params_key
from unity.pcg.operators.promised_reads import promised
from unity.pcg.types.parallel_type import Shape
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import applications

Mode = lax.GatherScatterMode
SAID = ("mode", "fill_value")  # what look-ups say of indices outside


def manner(mode: Mode) -> str:
    """Returns, as text, how look-ups in a mode treat indices outside of the table."""
    return params_key(dict(zip(SAID, (mode, None), strict=True)))


CLIPPED, PROMISED = manner(Mode.CLIP), manner(Mode.PROMISE_IN_BOUNDS)


@lru_cache(maxsize=4096)
def counts(rule: Rule) -> bool:
    """Whether a rule computes with indices, as is true of look-ups that clamp."""
    return any(t.operator in ("within", "behind") for t in applications(rule.sides))


@lru_cache(maxsize=4096)
def program(rows: Shape, dtype: str, ids: Shape, kind: str, size: int) -> Body:
    """`promised` of rows that were read and of indices of these shapes and types, as a program."""
    given = jax.ShapeDtypeStruct(rows, dtype), jax.ShapeDtypeStruct(ids, kind)
    return close(jax.make_jaxpr(lambda x, i: promised(x, i, size))(*given))
