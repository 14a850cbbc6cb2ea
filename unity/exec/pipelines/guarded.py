"""Conditional work whose gradient keeps no operand as a residual.

With `lax.cond` alone, every branch returns all of its residuals, weights among them, which a loop would stack once for every
step. Here the pullback is split: only residuals that are not operands are returned, and operands are passed to it again.
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


def taken_in(times: int, runs: int) -> AbstractContextManager[Any]:
    """Return a scope for branches that a device takes `times` times in `runs` runs, as readers of the HLO must know."""
    return jax.named_scope(f"taken {times} of {runs}")


def part_taken(scope: str) -> Fraction:
    """Return the share of its runs in which a device runs the code of a scope."""
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
    """The structure of a pullback, so that it can be split into residuals and operands and put together again.

    The forward pass writes it while it is traced, the backward pass reads it.

    Attributes:
        tree: the pullback's structure.
        given: for each leaf, which operand it is; -1 for a residual.
        kept: zeros that stand for the residuals.
    """

    tree: Any = None
    given: list[int] = field(default_factory=list)
    kept: list[Zeros] = field(default_factory=list)

    def apart(self, pull: Any, given: Sequence[Any]) -> list[Any]:
        """Return the residuals of a pullback that are none of the operands `given`."""
        leaves, self.tree = jax.tree.flatten(pull)
        numbers = {id(x): k for k, x in enumerate(given)}
        self.given = [numbers.get(id(x), -1) for x in leaves]
        residuals = [x for x, k in zip(leaves, self.given, strict=True) if k < 0]
        self.kept = [zeros_of(x) for x in residuals]
        return residuals

    def together(self, kept: Sequence[Any], given: Mapping[int, Any]) -> Any:
        """Return the pullback, of its residuals and of operands by number."""
        rest = iter(kept)
        return jax.tree.unflatten(self.tree, [next(rest) if k < 0 else given[k] for k in self.given])


def guarded(work: Work, works: jax.Array, parts: Sequence[Any], *more: Sequence[Any]) -> tuple[Any, ...]:
    """Return `work(parts, *more)` where `works`, else the parts unchanged. Results have the shapes and types of the parts.

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
            return results, pullback.apart(pull, [*values, *rest.values()])

        def idling(values: Sequence[Any], rest: dict[int, Any]) -> tuple[Any, list[Any]]:
            return idle(values, rest), [zeros() for zeros in pullback.kept]

        jax.eval_shape(working, values, rest)  # fills `pullback`
        results, kept = loops.cond(works, working, idling, values, rest)
        operands = [*values, *rest.values()]
        return results, (works, kept, {k: operands[k] for k in pullback.given if k >= 0})

    def backward(residuals: Any, cotangents: Any) -> Any:
        works, kept, given = residuals

        def working(kept: Any, given: Any, cotangents: Any) -> list[Any]:
            return list(pullback.together(kept, given)(cotangents))

        def idling(kept: Any, given: Any, cotangents: Any) -> list[Any]:
            passed = dict(zip(ends, cotangents, strict=True))
            return [passed[k] if k in passed else nothing() for k, nothing in zip(real, nothings, strict=True)]

        return None, loops.cond(works, working, idling, kept, given, [cotangents[k] for k in ends]), None

    call.defvjp(forward, backward)
    return call(works, [every[k] for k in real], others)
