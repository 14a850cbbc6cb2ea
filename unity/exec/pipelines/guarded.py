"""Work that is done only where there is some, whose gradient keeps nothing twice.

`lax.cond` alone would do, but for its gradient every branch hands out all that it keeps, weights too: in a loop they would be
stacked once for every step. So the pullback is taken apart here: what it keeps is handed out, but for what was given.
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
    """A scope for branches of which a device takes each so many times in so many runs: who counts what is compiled must know."""
    return jax.named_scope(f"taken {times} of {runs}")


def part_taken(scope: str) -> Fraction:
    """In which part of its runs a device does what is compiled in a scope."""
    found = Fraction(1)
    for times, runs in re.findall(r"\btaken (\d+) of (\d+)", scope):
        found *= Fraction(int(times), int(runs))
    return found


@dataclass(frozen=True)
class Zeros:
    """Makes zeros in the place of an array of one device: of its shape and type, and along which axes it differs, for JAX."""

    shape: tuple[int, ...]
    dtype: Any
    names: frozenset[str]

    def __call__(self) -> jax.Array:
        return vary(jnp.zeros(self.shape, self.dtype), self.names)


def zeros_of(x: jax.Array) -> Zeros:
    """Zeros in the place of an array."""
    return Zeros(tuple(x.shape), x.dtype, varying(x))


@dataclass
class Pullback:
    """How a pullback is put together again: its structure, and of each of its leaves which of the given arrays it is.

    (-1: a kept one.) Written where the forward pass is traced, read where the backward pass is.
    """

    tree: Any = None
    given: list[int] = field(default_factory=list)
    kept: list[Zeros] = field(default_factory=list)  # in the place of what is kept, where nothing is done

    def apart(self, pull: Any, given: Sequence[Any]) -> list[Any]:
        leaves, self.tree = jax.tree.flatten(pull)
        known = {id(x): k for k, x in enumerate(given)}
        self.given = [known.get(id(x), -1) for x in leaves]
        kept = [x for x, k in zip(leaves, self.given, strict=True) if k < 0]
        self.kept = [zeros_of(x) for x in kept]
        return kept

    def together(self, kept: Sequence[Any], given: Mapping[int, Any]) -> Any:
        rest = iter(kept)
        return jax.tree.unflatten(self.tree, [next(rest) if k < 0 else given[k] for k in self.given])


def guarded(work: Work, works: jax.Array, parts: Sequence[Any], *more: Sequence[Any]) -> tuple[Any, ...]:
    """`work(parts, *more)` where `works`, else the parts as they are. Results are as many as parts, and alike.

    Nothing but real numbers has a gradient, as everywhere.
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
                found = run(values, rest)
                return [found[k] for k in ends], found

            _, pull, found = jax.vjp(differentiable, *values, has_aux=True)
            return found, pullback.apart(pull, [*values, *rest.values()])

        def idling(values: Sequence[Any], rest: dict[int, Any]) -> tuple[Any, list[Any]]:
            return idle(values, rest), [zeros() for zeros in pullback.kept]

        jax.eval_shape(working, values, rest)  # so that it is known what is kept
        found, kept = loops.cond(works, working, idling, values, rest)
        given = [*values, *rest.values()]
        return found, (works, kept, {k: given[k] for k in pullback.given if k >= 0})

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
