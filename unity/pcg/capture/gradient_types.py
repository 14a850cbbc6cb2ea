"""The weak types of a function's gradients, which JAX derives from its operators and its derivative rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from unity.pcg.capture.capture import Captured
from unity.pcg.ir.gradient_flow import losses
from unity.pcg.ir.nested_programs import bodies
from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.weak_types import is_weak


def may_be_unlike_arguments(captured: Captured, weak: Sequence[bool]) -> bool:
    """Return whether a gradient may have another weak type than its argument.

    If no argument is weakly typed, only the backward rule of a `jax.custom_vjp` can be the reason.
    """
    return any((*weak, *captured.weak[0])) or _has_backward_rules(captured.body)


def _has_backward_rules(body: Body) -> bool:
    """Return whether a program, or one nested in it, calls a `jax.custom_vjp`."""
    return any(e.name.startswith("custom_vjp") or any(map(_has_backward_rules, bodies(e))) for e in body.equations)


def gradients_are_weak(
    fn: Callable[..., Any], captured: Captured, weak: Sequence[bool], shardings: Sequence[NamedSharding | None]
) -> tuple[bool, ...]:
    """Trace the gradients of a captured function, and return for every argument leaf whether its gradient is weakly typed.

    The gradients are those of the loss, or else of all results. Leaves without a gradient count as not weakly typed. If JAX cannot
    differentiate the function itself, such as a `while_loop` that capture turns into a scan, each gradient counts as
    weakly typed where its argument is.

    Args:
        fn: the function.
        captured: what was captured of it.
        weak: whether each argument leaf is weakly typed.
        shardings: the sharding of each argument leaf along the explicit axes of a mesh, if it has any.
    """
    tensors = [node.tensors[0] for node in captured.graph.inputs[: len(weak)]]
    structs = [t.struct.update(weak_type=w, sharding=s) for t, w, s in zip(tensors, weak, shardings, strict=True)]
    inexact = [k for k, t in enumerate(tensors) if jnp.issubdtype(t.dtype, jnp.inexact)]

    def gradients(*leaves: Any) -> Any:
        def differentiable(*own: Any) -> list[Any]:
            every = {**dict(enumerate(leaves)), **dict(zip(inexact, own, strict=True))}
            results = jax.tree.leaves(fn(*jax.tree.unflatten(captured.in_tree, [every[k] for k in range(len(leaves))])))
            return [jnp.asarray(results[k]) for k in losses(captured.graph)]

        results, pull = jax.vjp(differentiable, *(leaves[k] for k in inexact))
        return pull([lax.full_like(r, 1) for r in results])

    try:
        avals = jax.make_jaxpr(gradients)(*structs).out_avals
    except Exception:  # kernels, and JAX, raise errors of any type where they have no derivative
        return tuple(weak)
    of = dict(zip(inexact, map(is_weak, avals), strict=True))
    return tuple(of.get(k, False) for k in range(len(weak)))
