"""Tests of a kernel's declared dimensions: its results and gradients for whole arguments, compared with those for halves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from unity.pcg.jaxprs.jaxprs import floating
from unity.pcg.operators.kernel_primitive import Function, KernelDimensions, Terms, listed, pulled, results_of


class _Output(NamedTuple):
    """A result or a gradient of a kernel."""

    title: str
    term: tuple[str, ...]  # the names of its dimensions
    value: jax.Array


def differences(
    function: Function, dimensions: KernelDimensions, operands: Sequence[jax.Array], gradients: bool
) -> Iterator[tuple[str, str, float]]:
    """Yield (name, title, difference) for every name along which a kernel may be divided and every result or gradient of it.

    The difference is that between the output for whole arguments and the outputs for halves put together, relative to its largest
    value.

    Args:
        function: the kernel.
        dimensions: its declared dimensions.
        operands: its arguments.
        gradients: whether to compare gradients, by random cotangents, too.
    """
    cotangents = _random(results_of(function, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands])) if gradients else []
    terms = tuple(term for term, c in zip(dimensions.results, cotangents, strict=False) if c is not None)
    cotangents = [c for c in cotangents if c is not None]
    outputs = _outputs(function, dimensions, operands, cotangents)
    for name in (*dimensions.split, *dimensions.summed):
        halves = [
            _outputs(function, dimensions, half(operands, dimensions.operands, name, k), half(cotangents, terms, name, k))
            for k in range(2)
        ]
        for output, first, second in zip(outputs, *halves, strict=True):
            joined = (
                jnp.concatenate([first.value, second.value], output.term.index(name))
                if name in output.term
                else first.value + second.value
            )
            yield name, output.title, relative_difference(output.value, joined)


def _random(results: Sequence[Any]) -> list[jax.Array | None]:
    """Return a random cotangent for every floating result, and None for the others."""
    keys = jax.random.split(jax.random.key(0), len(results))
    return [jax.random.normal(key, r.shape).astype(r.dtype) if floating(r) else None for key, r in zip(keys, results, strict=True)]


def _outputs(
    function: Function, dimensions: KernelDimensions, operands: Sequence[jax.Array], cotangents: Sequence[jax.Array]
) -> list[_Output]:
    """Return the results of a kernel and, if there are cotangents, its gradients."""
    out, pull = pulled(function, *operands) if cotangents else (listed(function)(*operands), None)
    outputs = [_Output(f"result {k}", term, y) for k, (term, y) in enumerate(zip(dimensions.results, out, strict=True))]
    if pull is not None:
        floats = [k for k, x in enumerate(operands) if floating(x)]
        gradients = zip(floats, pull(list(cotangents)), strict=True)
        outputs += [_Output(f"the gradient of argument {k}", dimensions.operands[k], g) for k, g in gradients]
    return outputs


def sample(number: int, shape: tuple[int, ...], dtype: Any, positive: bool = False) -> jax.Array:
    """Return random numbers, between 0 and 1 if `positive`; random keys; or zeros in place of integers, which may be indices."""
    key = jax.random.key(number)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(key, shape)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.zeros(shape, dtype)
    return (jax.random.uniform if positive else jax.random.normal)(key, shape).astype(dtype)


def half(arrays: Sequence[jax.Array], terms: Terms, name: str, which: int) -> list[jax.Array]:
    """Return one half of each array that has the name, and the other arrays whole."""
    return [jnp.split(x, 2, term.index(name))[which] if name in term else x for x, term in zip(arrays, terms, strict=True)]


def relative_difference(whole: jax.Array, joined: jax.Array) -> float:
    """Return the largest difference of two arrays relative to the largest finite value of the first; NaN if one is infinite."""
    x, y = (np.asarray(array).astype(complex) for array in (whole, joined))  # booleans and unsigned integers have differences too
    differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
    if not np.isfinite([x[differ], y[differ]]).all():
        return float("nan")
    largest = float(np.max(np.abs(x[np.isfinite(x)]), initial=0.0))
    return float(np.max(np.abs(x[differ] - y[differ]), initial=0.0)) / (largest or 1.0)
