"""The residuals that JAX itself keeps of one equation. In a scan these are final: each is stacked, and no fusion removes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
from jax.extend import core

from unity.pcg.ir.nested_programs import programs
from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.trace_contexts import precision_of


@dataclass(frozen=True)
class TypedEquation:
    """An equation with the types of its operands and results; equal ones have the same residuals.

    Attributes:
        differentiated: the positions of the operands to which gradients flow.
        varying: the positions of the operands that differ from one step of the scan to the next.
    """

    signature: str
    identity: tuple[int, ...]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    differentiated: tuple[int, ...]
    varying: tuple[int, ...]
    equation: Equation = field(compare=False, repr=False)


@dataclass(frozen=True)
class TracedResiduals:
    """Residuals of an equation: operands and results, by position, and the bytes of each residual that is neither.

    Those in the memory of the host, which a checkpoint inside of the equation offloads, have a list of their own.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    other_nbytes: tuple[int, ...]
    host_nbytes: tuple[int, ...] = ()


@lru_cache(maxsize=16384)
def traced_residuals(application: TypedEquation) -> TracedResiduals | None:
    """Return the residuals that JAX keeps, or None if it cannot differentiate or trace the equation.

    It cannot trace an equation with a rewritten program (`Body`), such as a conditional whose printed values became results.
    Values that do not depend on varying operands are not residuals, because JAX hoists them out of the scan.
    """
    if any(isinstance(program, Body) for program in programs(application.equation.params)):
        return None
    try:
        with precision_of((*application.operands, *application.results)):
            closed = jax.make_jaxpr(lambda *xs: _forward(application, xs))(*application.operands)
    except (NotImplementedError, TypeError, ValueError):
        return None
    program, n = closed.jaxpr, len(application.equation.results)
    operands = {v: p for p, v in enumerate(program.invars)}
    results = {v: k for k, v in reversed(list(enumerate(program.outvars[:n]))) if not isinstance(v, core.Literal)}
    varying = {program.invars[p] for p in application.varying}
    for eqn in program.eqns:
        if any(not isinstance(v, core.Literal) and v in varying for v in eqn.invars):
            varying.update(eqn.outvars)
    residuals = [v for v in dict.fromkeys(v for v in program.outvars[n:] if not isinstance(v, core.Literal)) if v in varying]
    others: list[Any] = [v.aval for v in residuals if v not in operands and v not in results]
    return TracedResiduals(
        tuple(operands[v] for v in residuals if v in operands),
        tuple(results[v] for v in residuals if v in results and v not in operands),
        tuple(x.size * x.dtype.itemsize for x in others if not _is_on_host(x)),
        tuple(x.size * x.dtype.itemsize for x in others if _is_on_host(x)),
    )


def _is_on_host(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def _forward(application: TypedEquation, operands: Any) -> Any:
    """Return an equation's results, and the derivative as JAX's tree of residuals."""
    e, at = application.equation, application.differentiated

    def of(*chosen: Any) -> Any:
        replaced = dict(zip(at, chosen, strict=True))
        return e.primitive.bind(*(replaced.get(p, x) for p, x in enumerate(operands)), **e.params)

    return jax.vjp(of, *(operands[p] for p in at))
