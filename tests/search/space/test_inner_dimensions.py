"""Choices on several axes divide the dimensions inside of an operator, too, as far as these can be divided."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unity.machine.machine import Machine
from unity.pcg.ir.program import Atom, Body, Equation, close
from unity.pcg.propagation.choices import choices
from unity.pcg.propagation.nested.programs import nested_body
from unity.pcg.propagation.placement import along_axis
from unity.pcg.propagation.propagation import Solution
from unity.pcg.types.parallel_type import REPLICATED, State, misfit
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


def summed(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(jnp.repeat(jnp.broadcast_to(jnp.sin(x)[:, None], (3, 4)), 2, axis=1) * w)


RULED = jax.custom_jvp(summed)
RULED.defjvp(lambda primals, tangents: jax.jvp(summed, primals, tangents))


def nested(x: jax.Array, w: jax.Array) -> jax.Array:
    """Divide inside of a program in the body, as `weighted` does in the body itself."""
    return jnp.cos(RULED(x, w) * 2)


CASES = [(nested, (3,), (3, 8)), (weighted, (3,), (3, 8)), (grouped, (4, 4, 6), (4, 8, 6)), (regrouped, (12, 2), (4,))]


def divides(body: Body, per_axis: Sequence[Solution | None]) -> bool:
    """Return whether all axes together divide what they divide of a body's variables, those of nested programs too."""

    def types(atoms: Iterable[Atom]) -> list[tuple[State, ...]]:
        return [tuple(REPLICATED if s is None or not isinstance(a, int) else s.seen(a) for s in per_axis) for a in atoms]

    def nested(e: Equation) -> bool:
        program, operands, results = nested_body(e), types(e.operands), types(e.results)
        ends = ([tuple(t[k] for t in end) for end in (operands, results)] for k in range(len(per_axis)))
        return divides(program, [along_axis(program, *states) for states in ends])

    shapes = (body.tensors[v].shape for v in body.tensors)
    whole = all(misfit(shape, type_, AXES) is None for shape, type_ in zip(shapes, types(body.tensors), strict=True))
    return whole and all(nested(e) for e in body.equations if e.name == "custom_jvp_call")


@pytest.mark.parametrize(("fn", "first", "second"), CASES)
def test_what_is_divided_inside_fits(fn: Callable, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    body = close(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (first, second))))
    cs = choices(body)
    picks = np.array(list(product(range(len(cs)), repeat=len(AXES))), np.int16)
    solutions = [along_axis(body, c.operands, c.results) for c in cs]
    good = fits(cs, [body.tensor(a).shape for a in (*body.inputs, *body.outputs)], picks, AXES)
    assert good.any()
    assert all(divides(body, [solutions[k] for k in pick]) for pick in picks[good])
