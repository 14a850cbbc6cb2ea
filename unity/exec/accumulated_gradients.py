"""A loop over micro-batches whose backward pass follows each forward pass at once: residuals of one micro-batch at a time are live.

One of the loop's carries is a loss, to which each step adds a term. A step also computes the gradients of its term, for a cotangent
of one, and adds those of the loop's constants up. After the loop the gradients are multiplied by the cotangent of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from unity.base.errors import OptionError
from unity.exec.saved_gradients import in_order, restored, saved
from unity.pcg.ir.graph import Node, carried_by
from unity.pcg.ir.payloads import Scan
from unity.pcg.local import varying_loops as loops
from unity.pcg.local.collectives import contribute
from unity.pcg.parallel.traffic import repeated_loss
from unity.pcg.types.accumulation import accumulator
from unity.pcg.types.axis import Axis
from unity.pcg.types.varying_axes import common, vary, varying

Arrays: TypeAlias = tuple[Any, ...]
Step: TypeAlias = Callable[..., Sequence[Any]]

FURTHER = (
    "expected gradients of the plan's first result alone, since a loop over micro-batches adds up the loss's gradients only, but"
    " another result is differentiated, too.\n    Return the sum of what is differentiated as the first result, or plan without"
    " micro_batches. (docs: memory#micro-batches)"
)


def accumulated(node: Node, operands: Sequence[Any], axes: Sequence[Axis], step: Step) -> list[Any]:
    """Return the results of a loop over micro-batches, inside of `shard_map`.

    Args:
        node: the loop.
        operands: one device's pieces of its operands.
        axes: the mesh.
        step: the local program of a step.
    """
    loop = node.of(Scan)
    assert loop.loss is not None
    number, carried = loop.loss, carried_by(node)
    over = tuple(axes[i].name for i in repeated_loss(node, lambda _: True))
    walk = _MicroBatchLoop(loop, number, step, over)
    real = [p for p, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]
    others = {p: x for p, x in enumerate(operands) if p not in real}

    @jax.custom_vjp
    def call(values: Sequence[Any], rest: dict[int, Any]) -> Arrays:
        return walk.results(in_order(real, values, rest))

    def forward(values: Sequence[Any], rest: dict[int, Any]) -> tuple[Arrays, list[Any]]:
        active = [p for p, x in zip(real, values, strict=True) if x.perturbed and p not in carried]
        arrays = in_order(real, [x.value for x in values], {p: x.value for p, x in rest.items()})
        results, gradients = walk.results_and_gradients(arrays, active)
        return results, saved(gradients, real)

    def backward(residuals: list[Any], cotangents: Arrays) -> tuple[list[Any], None]:
        if any(not isinstance(x, SymbolicZero) for p, x in enumerate(cotangents) if p != number):
            raise OptionError(FURTHER)
        scaled = _scaled(restored(residuals), cotangents[number], over)
        return [None if g is None else g.astype(operands[p].dtype) for p, g in zip(real, scaled, strict=True)], None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return list(call([operands[p] for p in real], others))


@dataclass(frozen=True, eq=False)
class _MicroBatchLoop:
    """A loop over micro-batches, on one device.

    Attributes:
        loop: its length, and the numbers of its constants and carries.
        loss: the number of the result to which each step adds its term of the loss.
        step: the local program of a step.
        over: the axes along which all devices add the same terms, so that the cotangent of a term is a partial sum.
    """

    loop: Scan
    loss: int
    step: Step
    over: tuple[str, ...]

    def results(self, operands: Sequence[Any]) -> Arrays:
        """Return the loop's results."""
        c, k = self.loop.consts, self.loop.carry

        def one(carry: Any, slices: Any) -> tuple[Any, Any]:
            out = self.step(*operands[:c], *carry, *slices)
            return out[:k], out[k:]

        carry, stacks = self.scan(one, operands[c : c + k], operands)
        return (*carry, *stacks)

    def results_and_gradients(self, operands: Sequence[Any], active: Sequence[int]) -> tuple[Arrays, dict[int, Any]]:
        """Return the loop's results, and the gradients of the sum of all terms with respect to active operands, by number.

        The active operands are constants, whose gradients are added up in float32 or wider, or stacks of which each step reads its
        slice.
        """
        c, k = self.loop.consts, self.loop.carry
        fixed, sliced = [p for p in active if p < c], [p for p in active if p >= c]

        def one(state: tuple[Any, Any], slices: Any) -> tuple[Any, Any]:
            carry, sums = state
            out, gradients = self.step_and_gradients((*operands[:c], *carry, *slices), active)
            sums = [x + g.astype(x.dtype) for x, g in zip(sums, gradients[: len(fixed)], strict=True)]
            return (out[:k], sums), (out[k:], gradients[len(fixed) :])

        zeros = [vary(jnp.zeros_like(operands[p], accumulator(operands[p].dtype)), varying(operands[p])) for p in fixed]
        (carry, sums), (stacks, rows) = self.scan(one, (operands[c : c + k], zeros), operands)
        return (*carry, *stacks), dict(zip((*fixed, *sliced), (*sums, *rows), strict=True))

    def step_and_gradients(self, inputs: Sequence[Any], active: Sequence[int]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the results of one step, and the gradients of its term with respect to active inputs."""

        def term(*values: Any) -> tuple[Any, Any]:
            by_number = dict(enumerate(inputs)) | dict(zip(active, values, strict=True))
            out = self.step(*by_number.values())
            return out[self.loss], out

        loss, pull, out = jax.vjp(term, *(inputs[p] for p in active), has_aux=True)
        one = vary(jnp.ones(loss.shape, loss.dtype), varying(loss))
        return out, pull(contribute(one, self.over) if self.over else one)

    def scan(self, step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, operands: Sequence[Any]) -> tuple[Any, Any]:
        """Run a step for every micro-batch, over the slices of those operands that are stacks."""
        stacks = operands[self.loop.consts + self.loop.carry :]
        return loops.scan(step, carry, stacks, self.loop.length, unroll=self.loop.unroll)


def _scaled(gradients: Sequence[Any], cotangent: Any, over: tuple[str, ...]) -> list[Any]:
    """Return gradients multiplied by the cotangent of the loss, a partial sum along the axes `over`; None stays None.

    The cotangent is the same on all devices along every other axis, though JAX may take it to vary where a gradient does not.
    """
    if isinstance(cotangent, SymbolicZero):
        return [None] * len(gradients)
    cotangent = lax.psum(cotangent, over) if over else cotangent

    def times(g: Any) -> Any:
        more = tuple(sorted(varying(cotangent) - varying(g)))
        factor = common(cotangent, more) if more else cotangent
        return g * vary(factor, varying(g)).astype(g.dtype)

    return [None if g is None else times(g) for g in gradients]
