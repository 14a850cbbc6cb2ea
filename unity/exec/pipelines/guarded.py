"""Conditional work whose gradient keeps no operand as a residual.

With `lax.cond` alone, every branch returns all of its residuals, weights among them, which a loop would stack once for every
step. Here the pullback is split: the forward pass returns only residuals that are not operands, and the backward pass adds the
operands again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from unity.pcg.local import varying_loops as loops
from unity.pcg.types.varying_axes import vary, varying

Work = Callable[..., tuple[Any, ...]]


def taken_scope(times: int, runs: int) -> AbstractContextManager[Any]:
    """Return a named scope for branches that a device takes `times` times in `runs` runs, so that the compiled HLO tells."""
    return jax.named_scope(f"taken {times} of {runs}")


def taken_share(scope: str) -> Fraction:
    """Return the share of runs in which a device takes the branches of `taken_scope` around an operation, by the HLO's name."""
    share = Fraction(1)
    for times, runs in re.findall(r"\btaken (\d+) of (\d+)", scope):
        share *= Fraction(int(times), int(runs))
    return share


@dataclass(frozen=True)
class Zeros:
    """A factory of zeros that stand for one device's array: its shape, its element type, and the axes along which it varies."""

    shape: tuple[int, ...]
    dtype: Any
    names: frozenset[str]

    def __call__(self) -> jax.Array:
        return vary(jnp.zeros(self.shape, self.dtype), self.names)


def zeros_of(x: jax.Array) -> Zeros:
    """Return the zeros that stand for an array."""
    return Zeros(tuple(x.shape), x.dtype, varying(x))


@dataclass
class Pullback:
    """The structure of a pullback, by which it is split into residuals and operands, and joined from them again.

    The forward pass writes it while it is traced, the backward pass reads it.

    Attributes:
        tree: the pullback's tree structure.
        operand_numbers: for each leaf, the number of the operand that it is; -1 for a residual.
        residuals: zeros that stand for the residuals.
    """

    tree: Any = None
    operand_numbers: list[int] = field(default_factory=list)
    residuals: list[Zeros] = field(default_factory=list)

    def split(self, pull: Any, operands: Sequence[Any]) -> list[Any]:
        """Record the structure of a pullback, and return its residuals: the leaves that are none of these operands."""
        leaves, self.tree = jax.tree.flatten(pull)
        numbers = {id(x): k for k, x in enumerate(operands)}
        self.operand_numbers = [numbers.get(id(x), -1) for x in leaves]
        residuals = [x for x, k in zip(leaves, self.operand_numbers, strict=True) if k < 0]
        self.residuals = [zeros_of(x) for x in residuals]
        return residuals

    def join(self, residuals: Sequence[Any], operands: Mapping[int, Any]) -> Any:
        """Return the pullback with these residuals and operands, the latter by number."""
        rest = iter(residuals)
        return jax.tree.unflatten(self.tree, [next(rest) if k < 0 else operands[k] for k in self.operand_numbers])


def guarded(work: Work, works: jax.Array, parts: Sequence[Any], *more: Sequence[Any]) -> tuple[Any, ...]:
    """Return `work(parts, *more)` if `works`, or else the parts unchanged. Results have the shapes and types of the parts.

    Only floating operands have gradients.
    """
    every, tree = jax.tree.flatten((tuple(parts), *more))
    real = [k for k, x in enumerate(every) if jnp.issubdtype(x.dtype, jnp.inexact)]
    others = {k: x for k, x in enumerate(every) if k not in real}
    ends = [k for k in real if k < len(parts)]  # results that have a gradient
    nothings = [zeros_of(every[k]) for k in real]
    pullback = Pullback()

    def run(values: Sequence[Any], rest: dict[int, Any]) -> tuple[Any, ...]:
        whole = rest | dict(zip(real, values, strict=True))
        return work(*jax.tree.unflatten(tree, [whole[k] for k in range(len(every))]))

    def idle(values: Sequence[Any], rest: dict[int, Any]) -> tuple[Any, ...]:
        whole = rest | dict(zip(real, values, strict=True))
        return tuple(whole[k] for k in range(len(parts)))

    @jax.custom_vjp
    def call(works: jax.Array, values: Sequence[Any], rest: dict[int, Any]) -> tuple[Any, ...]:
        return loops.cond(works, run, idle, values, rest)

    def forward(works: jax.Array, values: Sequence[Any], rest: dict[int, Any]) -> tuple[Any, Any]:
        def working(values: Sequence[Any], rest: dict[int, Any]) -> tuple[Any, list[Any]]:
            def differentiable(*values: Any) -> tuple[Any, Any]:
                results = run(values, rest)
                return [results[k] for k in ends], results

            _, pull, results = jax.vjp(differentiable, *values, has_aux=True)
            return results, pullback.split(pull, [*values, *rest.values()])

        def idling(values: Sequence[Any], rest: dict[int, Any]) -> tuple[Any, list[Any]]:
            return idle(values, rest), [zeros() for zeros in pullback.residuals]

        jax.eval_shape(working, values, rest)  # fills `pullback`
        results, residuals = loops.cond(works, working, idling, values, rest)
        operands = [*values, *rest.values()]
        return results, (works, residuals, {k: operands[k] for k in pullback.operand_numbers if k >= 0})

    def backward(saved: Any, cotangents: Any) -> Any:
        works, residuals, operands = saved

        def working(residuals: Any, operands: Any, cotangents: Any) -> list[Any]:
            return list(pullback.join(residuals, operands)(cotangents))

        def idling(residuals: Any, operands: Any, cotangents: Any) -> list[Any]:
            passed = dict(zip(ends, cotangents, strict=True))
            return [passed[k] if k in passed else nothing() for k, nothing in zip(real, nothings, strict=True)]

        return None, loops.cond(works, working, idling, residuals, operands, [cotangents[k] for k in ends]), None

    call.defvjp(forward, backward)
    return call(works, [every[k] for k in real], others)
