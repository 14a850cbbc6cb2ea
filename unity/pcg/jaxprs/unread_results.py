"""Dead-code elimination in nested programs, as XLA does it: results of scans, remats and branches that nothing reads."""

from __future__ import annotations

from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from unity.pcg.jaxprs.trace_contexts import without_mesh


def without_unread_results(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Remove what no result of a program depends on, from its nested programs too. Its arguments and effects stay."""
    with without_mesh():
        jaxpr, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars), instantiate=True)
    return core.ClosedJaxpr(jaxpr, program.consts)
