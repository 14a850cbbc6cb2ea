"""Primitives that other packages made, such as the linear solves of Lineax: their programs in JAX's own primitives.

Their rules, for derivatives and for lowering, are functions of their packages, which compare the types that they get with those
they were made for. Inside of a `shard_map` types say along which axes values differ, so there they would refuse everything.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import jax
from jax.extend import core

from unity.pcg.factors import TABLE
from unity.pcg.meshes import apart, forgotten
from unity.pcg.within import Program, equations


def foreign(primitive: core.Primitive) -> bool:
    """Whether a primitive is neither JAX's own nor in the operator table, and has an implementation."""
    made = getattr(primitive.impl, "func", primitive.impl)
    return primitive.name not in TABLE and made.__module__.partition(".")[0] not in ("jax", "jaxlib")


def own_program(eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """What a foreign primitive computes, as a program; None of others, and of one that only computes with numbers."""
    return _implementation(eqn) if foreign(eqn.primitive) else None


@lru_cache(maxsize=1024)
def _implementation(eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
    try:
        return outside(lambda *given: eqn.primitive.impl(*given, **eqn.params), [v.aval for v in eqn.invars])
    except Exception:  # its implementation is not in terms of JAX
        return None


def outside(run: Any, arguments: Any) -> core.ClosedJaxpr:
    """A function's program outside of any mesh, in the precision that its arguments have, whatever is switched on by now."""
    structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)
    wide = any(getattr(s.dtype, "itemsize", 0) == 8 for s in jax.tree.leaves(structs))
    with jax.enable_x64(True) if wide else nullcontext(), apart():
        return forgotten(jax.make_jaxpr(run)(*structs))


def with_foreign(program: Program) -> bool:
    """Whether a program has foreign primitives, in loops and branches too."""
    return any(own_program(e) is not None for eqn in program.eqns for e in (eqn, *equations(eqn)))
