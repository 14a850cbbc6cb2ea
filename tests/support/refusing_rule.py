"""A function whose derivative rule refuses to differentiate one of its operands, as those of Equinox' `filter_custom_vjp` do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_vjp
def scaled(x: Any, times: Any) -> Any:
    return jnp.tanh(x) * times.sum()


def _forward(x: Any, times: Any) -> Any:
    if times.perturbed:
        raise RuntimeError("times cannot be differentiated")
    return scaled(x.value, times.value), (x.value, times.value)


scaled.defvjp(_forward, lambda r, g: (g * (1 - jnp.tanh(r[0]) ** 2) * r[1].sum(), None), symbolic_zeros=True)
