"""Shardings propagate from the values that a plan constrains, so that elementwise computations with these need no communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from unity.training.sharding_propagation import propagated_specs


def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def planned(x: jax.Array, *spec: Any) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(mesh(), P(*spec)))


def followed(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> list[P]:
    jaxpr = jax.make_jaxpr(fn)(*(jnp.zeros(shape) for shape in shapes)).jaxpr
    specs = propagated_specs(jaxpr, mesh())
    return [specs.get(v, P()) for v in jaxpr.invars]


def moment(w: jax.Array, m: jax.Array) -> Any:
    return 0.9 * m + planned(w, "a", "b") ** 2


def rows(w: jax.Array, r: jax.Array, c: jax.Array) -> Any:
    square = planned(w, "a", "b") ** 2
    return r + square.mean(1), c + square.mean(0)


def transposed(w: jax.Array, m: jax.Array) -> Any:
    return m + jnp.transpose(planned(w, "a", "b"))


def nearest(w: jax.Array, v: jax.Array, m: jax.Array) -> Any:
    w, v = planned(w, "a", None), planned(v, None, "b")
    return (m + w) + (v * 2 + 1) * 3


def branched(w: jax.Array, m: jax.Array) -> Any:
    return lax.cond(m.sum() > 0, lambda w, m: m + w, lambda w, m: m, planned(w, "a", "b"), m)


def carried(w: jax.Array, m: jax.Array) -> Any:
    w = planned(w, "a", "b")
    return lax.scan(lambda total, _: (total + w, None), m, None, length=3)[0]


def stacked(w: jax.Array, xs: jax.Array) -> Any:
    return lax.scan(lambda total, x: (total + planned(x, "a", "b"), None), w, xs)[0]


def elsewhere(w: jax.Array, m: jax.Array) -> Any:
    other = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    return m + lax.with_sharding_constraint(w, NamedSharding(other, P("x")))


CASES: list[tuple[Callable[..., Any], list[tuple[int, ...]], list[P], bool]] = [  # and whether nothing is sent
    (moment, [(8, 4)] * 2, [P("a", "b")] * 2, True),
    (jax.jit(moment), [(8, 4)] * 2, [P("a", "b")] * 2, True),
    (rows, [(8, 4), (8,), (4,)], [P("a", "b"), P("a"), P("b")], False),
    (transposed, [(8, 4), (4, 8)], [P("a", "b"), P("b", "a")], True),
    (nearest, [(8, 8)] * 3, [P("a", None), P(None, "b"), P("a", None)], False),
    (branched, [(8, 4)] * 2, [P("a", "b")] * 2, False),
    (carried, [(8, 4)] * 2, [P("a", "b")] * 2, True),
    (stacked, [(8, 4), (5, 8, 4)], [P("a", "b"), P(None, "a", "b")], True),
    (elsewhere, [(8, 4)] * 2, [P(), P()], False),
]


@pytest.mark.parametrize(("fn", "shapes", "specs", "local"), CASES)
def test_values_follow_through_operators(fn: Callable[..., Any], shapes: Any, specs: list[P], local: bool) -> None:
    assert followed(fn, *shapes) == specs
    if local:
        arrays = [jax.device_put(np.ones(s, np.float32), NamedSharding(mesh(), p)) for s, p in zip(shapes, specs, strict=True)]
        text = jax.jit(fn).lower(*arrays).compile().as_text() or ""
        assert text
        assert not any(name in text for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce"))
