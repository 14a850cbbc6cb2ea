"""A function whose derivative rule depends on state that no text of the function shows."""

from __future__ import annotations

from typing import Any

import jax


class Scale:
    """An object of which a text has the type alone."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def gradient(self, _: Any, g: jax.Array) -> tuple[jax.Array]:
        return (g * self.factor,)


def doubled(factor: float) -> Any:
    """Return a function that doubles a value, and whose gradient is `factor`."""

    @jax.custom_vjp
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    double.defvjp(lambda x: (x * 2, None), Scale(factor).gradient)
    return double
