"""Loops and conditionals whose values vary over the mesh axes that JAX requires.

Inside a `shard_map` JAX refuses a loop whose carry varies over more axes after a step than before it, and branches whose results
vary over different axes. A schedule cannot always tell these axes in advance: a residual may be a constant in one model and depend
on a sample in the next. So every loop and conditional that unity builds on pieces is one of these. A body is traced once; only if a
value turns out to vary over more axes than assumed, its trace is discarded and repeated with these axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from unity.pcg.types.varying_axes import vary, varying


class _Wider(Exception):
    """Signals that values vary over more axes than assumed: for each leaf, the axes that were missing."""

    def __init__(self, missing: Sequence[frozenset[str]] = ()) -> None:
        self.missing = missing


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Run `lax.scan` with a carry that varies over all axes over which a step's result does."""

    def run(carry: Any) -> tuple[Any, Any]:
        def checked_step(before: Any, x: Any) -> tuple[Any, Any]:
            after, ys = step(before, x)
            return _as_before(after, before), ys

        return lax.scan(checked_step, carry, xs, length, reverse, unroll)

    return _widened(run, carry)


def while_loop(more: Callable[[Any], Any], step: Callable[[Any], Any], carry: Any) -> Any:
    """Run `lax.while_loop` with a carry that varies over all axes over which a step's result does."""

    def run(carry: Any) -> Any:
        return lax.while_loop(more, lambda before: _as_before(step(before), before), carry)

    return _widened(run, carry)


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Run `lax.switch` with results that vary over all axes over which those of any branch do."""
    axes: list[frozenset[str]] = []

    def alike(branch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            leaves, tree = jax.tree.flatten(branch(*arguments))
            own = [varying(x) for x in leaves]
            if not axes:
                axes.extend(own)
            if any(names - assumed for names, assumed in zip(own, axes, strict=True)):
                axes[:] = [names | assumed for names, assumed in zip(own, axes, strict=True)]
                raise _Wider
            return jax.tree.unflatten(tree, map(vary, leaves, axes))

        return run

    while True:
        try:
            return lax.switch(index, [alike(branch) for branch in branches], *operands)
        except _Wider:
            continue


def cond(test: Any, then: Callable[..., Any], otherwise: Callable[..., Any], *operands: Any) -> Any:
    """Run `lax.cond` with results that vary over all axes over which those of either branch do."""
    return switch(jax.numpy.asarray(test, jax.numpy.int32), (otherwise, then), *operands)


def _as_before(after: Any, before: Any) -> Any:
    """Return a carry after a step, varying as before the step. Raises _Wider if it varies over more axes."""
    leaves, tree = jax.tree.flatten(after)
    assumed = [varying(x) for x in jax.tree.leaves(before)]
    missing = [varying(x) - names for x, names in zip(leaves, assumed, strict=True)]
    if any(missing):
        raise _Wider(missing)
    return jax.tree.unflatten(tree, map(vary, leaves, assumed))


def _widened(run: Callable[[Any], Any], carry: Any) -> Any:
    """Run a loop, with an initial carry that also varies over the axes that turn out to be missing."""
    leaves, tree = jax.tree.flatten(carry)
    while True:
        try:
            return run(jax.tree.unflatten(tree, leaves))
        except _Wider as wider:
            leaves = list(map(vary, leaves, wider.missing))
