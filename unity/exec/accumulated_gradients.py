"""A loop over micro-batches whose backward pass follows each forward pass at once, so that one micro-batch's residuals are live.

One of the loop's carries is a loss, to which each step adds a term. A step also computes the gradient of its term for a cotangent
of one, and adds it to those of the steps before. After the loop these sums are multiplied by the loss's cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from unity.base.errors import OptionError
from unity.pcg.ir.graph import Node
from unity.pcg.ir.payloads import Scan
from unity.pcg.local import varying_loops as loops
from unity.pcg.local.collectives import contribute
from unity.pcg.parallel.traffic import repeated_loss
from unity.pcg.types.axis import Axis
from unity.pcg.types.varying_axes import common, vary, varying

Arrays = tuple[Any, ...]

FURTHER = (
    "expected gradients of the plan's first result alone, since a loop over micro-batches adds up the loss's gradients only, but"
    " another result is differentiated, too.\n    Return the sum of what is differentiated as the first result, or plan without"
    " micro_batches. (docs: memory#micro-batches)"
)


def accumulated(node: Node, operands: Sequence[Any], axes: Sequence[Axis], step: Callable[..., Sequence[Any]]) -> list[Any]:
    """Return the results of a loop over micro-batches, inside of `shard_map`.

    Args:
        node: the loop.
        operands: one device's pieces of its operands.
        axes: the mesh.
        step: the local program of a step.
    """
    loop = node.of(Scan)
    assert loop.loss is not None
    number, c, k = loop.loss, loop.consts, loop.carry
    over = tuple(axes[i].name for i in repeated_loss(node, lambda _: True))
    real = [p for p, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]
    others = {p: x for p, x in enumerate(operands) if p not in real}

    def whole(values: Sequence[Any], rest: dict[int, Any]) -> list[Any]:
        by_number = rest | dict(zip(real, values, strict=True))
        return [by_number[p] for p in range(len(operands))]

    @jax.custom_vjp
    def call(values: Sequence[Any], rest: dict[int, Any]) -> Arrays:
        leaves = whole(values, rest)

        def one(carry: Any, xs: Any) -> tuple[Any, Any]:
            out = step(*leaves[:c], *carry, *xs)
            return out[:k], out[k:]

        carry, ys = loops.scan(one, leaves[c : c + k], leaves[c + k :], loop.length, unroll=loop.unroll)
        return (*carry, *ys)

    def forward(values: Sequence[Any], rest: dict[int, Any]) -> tuple[Arrays, list[Any]]:
        leaves = whole([x.value for x in values], {p: x.value for p, x in rest.items()})
        active = [p for p, x in zip(real, values, strict=True) if x.perturbed and not c <= p < c + k]
        fixed, stacked = [p for p in active if p < c], [p for p in active if p >= c + k]

        def one(state: tuple[Any, Any], xs: Any) -> tuple[Any, Any]:
            carry, sums = state
            here = dict(enumerate((*leaves[:c], *carry, *xs)))

            def term(*inputs: Any) -> tuple[Any, Any]:
                values_here = here | dict(zip(active, inputs, strict=True))
                out = step(*(values_here[p] for p in range(len(operands))))
                return out[number], out

            loss, pull, out = jax.vjp(term, *(here[p] for p in active), has_aux=True)
            one_ = vary(jnp.ones(loss.shape, loss.dtype), varying(loss))
            gradients = pull(contribute(one_, over) if over else one_)
            sums = [x + g for x, g in zip(sums, gradients[: len(fixed)], strict=True)]
            return (out[:k], sums), (out[k:], gradients[len(fixed) :])

        zeros = [vary(jnp.zeros_like(leaves[p]), varying(leaves[p])) for p in fixed]
        state = (leaves[c : c + k], zeros)
        (carry, sums), (ys, rows) = loops.scan(one, state, leaves[c + k :], loop.length, unroll=loop.unroll)
        gradients = dict(zip((*fixed, *stacked), (*sums, *rows), strict=True))
        return (*carry, *ys), [gradients.get(p) for p in real]

    def backward(gradients: list[Any], cotangents: Arrays) -> tuple[list[Any], None]:
        if any(not isinstance(x, SymbolicZero) for p, x in enumerate(cotangents) if p != number):
            raise OptionError(FURTHER)
        return _scaled(gradients, cotangents[number], over), None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return list(call([operands[p] for p in real], others))


def _scaled(gradients: Sequence[Any], by: Any, over: tuple[str, ...]) -> list[Any]:
    """Return gradients multiplied by a number, which is a partial sum along the axes `over`; None stays None.

    The number is the same on all devices along every other axis, though JAX may take it to vary where a gradient does not.
    """
    if isinstance(by, SymbolicZero):
        return [None] * len(gradients)
    by = lax.psum(by, over) if over else by

    def times(g: Any) -> Any:
        more = tuple(sorted(varying(by) - varying(g)))
        factor = common(by, more) if more else by
        return g * vary(factor, varying(g)).astype(g.dtype)

    return [None if g is None else times(g) for g in gradients]
