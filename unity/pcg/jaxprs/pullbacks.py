"""Pullbacks whose forward and backward parts are traced separately."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters.ad import Zero

from unity.pcg.jaxprs.jaxprs import chosen_of, merged


class EquationPullback:
    """The pullback of a function of flat operands and results.

    Args:
        function: the function.
        differentiated: for each operand whether the function is differentiated by it.

    Attributes:
        results, residuals: their types, known once `forward` is traced.
    """

    def __init__(self, function: Callable[..., Sequence[Any]], differentiated: Sequence[bool]) -> None:
        self.function, self.differentiated = function, differentiated
        self.results, self.residuals = list[Any](), list[Any]()
        self._tree: Any = None  # JAX's own pullback, a pytree of residuals

    def forward(self, *operands: Any) -> list[Any]:
        """Return the results, and then the residuals."""
        others = chosen_of(self.differentiated, operands, False)

        def run(*chosen: Any) -> Sequence[Any]:
            return self.function(*merged(self.differentiated, chosen, others))

        results, pull = jax.vjp(run, *chosen_of(self.differentiated, operands))
        residuals, self._tree = jax.tree.flatten(pull)
        self.results, self.residuals = list(map(jax.typeof, results)), list(map(jax.typeof, residuals))
        return [*results, *residuals]

    def backward(self, nonzero: Sequence[bool], residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Return the cotangents of the differentiated operands.

        Args:
            nonzero: for each result whether it has a cotangent; the cotangents of the others are zero.
            residuals: the residuals.
            cotangents: the cotangents of these results.
        """
        zeros = [Zero(aval.to_tangent_aval()) for aval in chosen_of(nonzero, self.results, False)]
        return list(jax.tree.unflatten(self._tree, residuals)(merged(nonzero, cotangents, zeros)))
