"""A value that devices reduce along one axis and move, gather or scatter along another is reduced by its own operation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parallel_cases import Application, Combination, fits

from unity.pcg.propagation.choice import Choice, choice_of
from unity.pcg.propagation.placement import placed
from unity.pcg.propagation.propagation import Unmatched
from unity.pcg.types.parallel_type import REPLICATED, UNUSED, partitioned

NUMBERS = np.random.default_rng(0).integers(-9, 9, (24, 8)).astype(np.float32)
REDUCTIONS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "sum": (lambda x: jnp.sum(x * x, 1), NUMBERS),
    "largest": (lambda x: jax.lax.stop_gradient(jnp.max(jnp.exp(x), 1)), NUMBERS),
    "least": (lambda x: jax.lax.stop_gradient(jnp.min(3 * x + 1, 1)), NUMBERS),
    "largest integer": (lambda x: jnp.max(3 * x + 1, 1), NUMBERS.astype(np.int32)),
    "any": (lambda x: jnp.any(~x, 1), NUMBERS < 8),
    "all": (lambda x: jnp.all(~x, 1), NUMBERS > 7),
}


class Reduction(Application):
    """Rows that are reduced and repeated, in every way along two axes in which one reduces and the other moves the rows."""

    def __init__(self, name: str, sizes: tuple[int, int]) -> None:
        reduce, x = REDUCTIONS[name]
        super().__init__(lambda x: jnp.broadcast_to(reduce(x)[:, None], x.shape), [x], sizes)

    @property
    def combinations(self) -> list[Combination]:
        legal = list[Choice]()
        for operand, result in itertools.product((partitioned(0), partitioned(1), REPLICATED, UNUSED), repeat=2):
            with suppress(Unmatched):
                solution = placed(self.body, (operand,), (result,))
                legal += [choice_of(self.body, solution)] if solution is not None and solution.matches else []
        pairs = [Combination(pair) for pair in itertools.product(legal, repeat=2) if any(c.moves for c in pair)]
        reducing = [c for c in pairs if any(r.kind for choice in c.choices for r in choice.reduced)]
        return [c for c in reducing if fits(self.body, c, self.axes)]

    def check(self) -> list[Combination]:
        every = self.combinations
        operands = [[self.pieces(x, t) for x, t in zip(self.args, c.operands, strict=True)] for c in every]
        (expected,), _ = self.whole()
        for c, out in zip(every, jax.jit(lambda operands: self.on_pieces(every, operands))(operands), strict=True):
            self.compare(str(c), out[0], expected, c.results[0])
        return every


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_rows_that_are_moved_are_reduced_by_their_own_operation(name: str, sizes: tuple[int, int]) -> None:
    assert Reduction(name, sizes).check()
