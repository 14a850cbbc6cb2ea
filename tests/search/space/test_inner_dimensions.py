"""Choices on several axes divide the dimensions inside of an operator, too, as far as these can be divided."""

from collections.abc import Callable
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unity.machine.machine import Machine
from unity.pcg.ir.program import close
from unity.pcg.propagation.choices import choices
from unity.pcg.propagation.placement import along_axis
from unity.pcg.types.parallel_type import REPLICATED, misfit
from unity.search.space.configurations import fits

AXES = Machine.grid(2, 4, "a100").axes


def weighted(x: jax.Array, w: jax.Array) -> jax.Array:
    """Repeat [3] to [3, 4, 2] and [3, 8]. Two choices divide alike inside: for a result that is unused, or replicated for use."""
    return jnp.cos(jnp.sum(jnp.repeat(jnp.broadcast_to(x[:, None], (3, 4)), 2, axis=1) * w))


def grouped(heads: jax.Array, scale: jax.Array) -> jax.Array:
    """Share each of 4 heads between 2 queries."""
    return jnp.tanh(jnp.sum(jnp.repeat(heads, 2, axis=1) * scale, (0, 1)))


def regrouped(rows: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.sin(lax.reshape(rows, (6, 4))).sum(0) * scale


CASES = [(weighted, (3,), (3, 8)), (grouped, (4, 4, 6), (4, 8, 6)), (regrouped, (12, 2), (4,))]


@pytest.mark.parametrize(("fn", "first", "second"), CASES)
def test_what_is_divided_inside_fits(fn: Callable, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    body = close(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (first, second))))
    cs = choices(body)
    picks = np.array(list(product(range(len(cs)), repeat=len(AXES))), np.int16)
    solutions = [along_axis(body, c.operands, c.results) for c in cs]

    def divides(pick: np.ndarray) -> bool:
        per_axis = [solutions[k] for k in pick]
        types = {v: tuple(REPLICATED if s is None else s.seen(v) for s in per_axis) for v in body.tensors}
        return all(misfit(body.tensors[v].shape, t, AXES) is None for v, t in types.items())

    good = fits(cs, [body.tensor(a).shape for a in (*body.inputs, *body.outputs)], picks, AXES)
    assert good.any()
    assert all(map(divides, picks[good]))
