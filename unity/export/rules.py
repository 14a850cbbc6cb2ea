"""Custom derivative rules of local programs, as programs: traced on pieces, inside a `shard_map`.

As `unity.pcg.propagation.derivative_rules` does on whole tensors: differentiating the call by itself yields the rule's program, in
which custom calls are their values, as nothing is differentiated again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax

from unity.export.tracing import Program, closed, like, traced
from unity.pcg.ir.program import Equation
from unity.pcg.jaxprs.jaxprs import called
from unity.pcg.propagation.derivative_rules import as_function, ruled

JVP = ("custom_jvp_call",)
VJP = ("custom_vjp_call", "custom_vjp_call_jaxpr")


@dataclass(frozen=True, eq=False)
class Rule:
    """A call, and how it is differentiated.

    `forward` and `backward` of a `custom_vjp`: operands → (results, what is kept); (what is kept, cotangents of the results) →
    cotangents of the floating operands. `derivative` of a `custom_jvp`: (operands, tangents of the floating ones) → (results,
    their tangents).
    """

    value: Program
    floating: tuple[bool, ...]
    forward: Program | None = None
    backward: Program | None = None
    derivative: Program | None = None


@lru_cache(maxsize=4096)
def rule_of(equation: Equation) -> Rule:
    """The programs of a custom rule; to be called inside of the `shard_map` that the call was traced in."""
    assert equation.origin is not None
    pieces = [like(v.aval) for v in equation.origin.invars]
    floating = ruled(equation)
    value = closed(called(equation.params))
    call = as_function(equation)

    def of_chosen(operands: Any) -> Any:
        others = [x for x, f in zip(operands, floating, strict=True) if not f]

        def run(*chosen: Any) -> Any:
            a, b = iter(chosen), iter(others)
            return call(*(next(a) if f else next(b) for f in floating))

        return run, [x for x, f in zip(operands, floating, strict=True) if f]

    if equation.name in JVP:

        def derivative(*given: Any) -> Any:
            run, chosen = of_chosen(given[: len(pieces)])
            return jax.jvp(run, tuple(chosen), tuple(given[len(pieces) :]))

        tangents = [p for p, f in zip(pieces, floating, strict=True) if f]
        return Rule(value, floating, derivative=traced(derivative, [*pieces, *tangents], rule=True))
    kept: dict[str, Any] = {}

    def forward(*operands: Any) -> Any:
        run, chosen = of_chosen(operands)
        results, pull = jax.vjp(run, *chosen)
        leaves, kept["tree"] = jax.tree.flatten(pull)
        kept["leaves"] = [like(jax.typeof(x)) for x in leaves]
        kept["results"] = [like(jax.typeof(x)) for x in results]
        return [*results, *leaves]

    first = traced(forward, pieces, rule=True)

    def backward(*given: Any) -> Any:
        n = len(kept["leaves"])
        return jax.tree.unflatten(kept["tree"], given[:n])(list(given[n:]))

    return Rule(value, floating, first, traced(backward, [*kept["leaves"], *kept["results"]], rule=True))
