"""What is said of a kernel, tried: its results and gradients for whole arguments beside those for halves, put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from unity.pcg.jaxprs.jaxprs import floating
from unity.pcg.operators.kernel_primitive import Dimensions, Function, Terms, listed, pulled, results_of


class _Made(NamedTuple):
    """A result or a gradient: what it is called, and the names of its dimensions."""

    what: str
    term: tuple[str, ...]
    value: jax.Array


def differences(
    function: Function, said: Dimensions, operands: Sequence[jax.Array], gradients: bool
) -> Iterator[tuple[str, str, float]]:
    """For every name along which a function may be divided, and everything that it makes: both, and the largest difference of
    what halves make, in parts of the largest value."""
    cotangents = _random(results_of(function, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands])) if gradients else []
    terms = tuple(term for term, c in zip(said.results, cotangents, strict=False) if c is not None)
    cotangents = [c for c in cotangents if c is not None]
    whole = _made(function, said, operands, cotangents)
    for name in (*said.split, *said.summed):
        parts = [
            _made(function, said, _half(operands, said.operands, name, k), _half(cotangents, terms, name, k)) for k in range(2)
        ]
        for one, first, second in zip(whole, *parts, strict=True):
            put = (
                jnp.concatenate([first.value, second.value], one.term.index(name))
                if name in one.term
                else first.value + second.value
            )
            yield name, one.what, _difference(one.value, put)


def _random(results: Sequence[Any]) -> list[jax.Array | None]:
    """A cotangent for every result that can have one."""
    keys = jax.random.split(jax.random.key(0), len(results))
    return [jax.random.normal(key, r.shape).astype(r.dtype) if floating(r) else None for key, r in zip(keys, results, strict=True)]


def _made(function: Function, said: Dimensions, operands: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> list[_Made]:
    """The results, and the gradients if there are cotangents."""
    out, pull = pulled(function, *operands) if cotangents else (listed(function)(*operands), None)
    found = [_Made(f"result {k}", term, y) for k, (term, y) in enumerate(zip(said.results, out, strict=True))]
    if pull is not None:
        real = [k for k, x in enumerate(operands) if floating(x)]
        moved = zip(real, pull(list(cotangents)), strict=True)
        found += [_Made(f"the gradient of argument {k}", said.operands[k], g) for k, g in moved]
    return found


def _half(arrays: Sequence[jax.Array], terms: Terms, name: str, which: int) -> list[jax.Array]:
    """One half of each array that has the name, and the others whole."""
    return [jnp.split(x, 2, term.index(name))[which] if name in term else x for x, term in zip(arrays, terms, strict=True)]


def _difference(whole: jax.Array, put: jax.Array) -> float:
    one, other = (np.asarray(x).astype(complex) for x in (whole, put))  # of truth values and unsigned numbers, too
    largest = float(np.max(np.abs(one), initial=0.0))
    return float(np.max(np.abs(one - other), initial=0.0)) / (largest or 1.0)
