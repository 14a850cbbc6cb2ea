"""Counter-based random bits: each device draws JAX's bits for its own elements, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core
from jax.extend.random import threefry2x32_p

from unity.machine.machine import Machine
from unity.optimize import optimize
from unity.pcg.ir.program import close
from unity.pcg.operators.counter_bits import bits, is_counter_based
from unity.pcg.propagation.choice import part_of_work
from unity.pcg.propagation.choices import choices
from unity.pcg.types.parallel_type import partitioned
from unity.plan.plan import Plan

WIDTHS = (8, 16, 32, 64)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[int, tuple[int, ...], list[np.ndarray]]:
    """Draw a width, a shape, and positions along each dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    wanted = [np.asarray(draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n)), np.int32) for n in shape]
    return draw(st.sampled_from(WIDTHS)), shape, wanted


@given(pieces(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=fewer(20))
def test_elements_have_the_bits_that_jax_gives_them(piece: tuple[int, tuple[int, ...], list[np.ndarray]], seed: int) -> None:
    width, shape, wanted = piece
    with jax.enable_x64(True):
        whole = jax.random.bits(jax.random.key(seed), shape, f"uint{width}")
        part = bits(jax.random.key(seed), width, shape, [jnp.asarray(p) for p in wanted])
    assert part.dtype == whole.dtype
    np.testing.assert_array_equal(part, np.asarray(whole)[np.ix_(*wanted)] if shape else whole)


def test_each_of_several_keys_has_its_own() -> None:
    keys = jax.random.split(jax.random.key(3), (2, 3))
    every = jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (4, 5))))(keys)
    part = bits(keys, 32, (4, 5), [jnp.asarray([1, 3]), jnp.arange(5)])
    np.testing.assert_array_equal(part, every[:, :, 1::2])


@pytest.mark.parametrize("at", [0, 1, 2**16 - 1, 2**16, 2**28 + 12345, 2**30 - 1])
def test_numbers_are_counted_beyond_one_word(at: int) -> None:
    """Numbers of elements have two words in tensors that are too large to draw in a test."""
    key, wide = jax.random.key(5), 3 * 2**15 + 7
    one, two = (jnp.uint32(word) for word in np.asarray(jax.random.key_data(key)))
    numbers = [at * wide + k for k in (0, wide - 1)]
    high, low = (jnp.asarray([part(n) for n in numbers], jnp.uint32) for part in (lambda n: n >> 32, lambda n: n % 2**32))
    first, second = threefry2x32_p.bind(one, two, high, low)
    found = bits(key, 32, (2**30, wide), [jnp.asarray([at], jnp.uint32), jnp.asarray([0, wide - 1], jnp.uint32)])
    np.testing.assert_array_equal(found[0], first ^ second)


def test_only_counter_based_generators_are_recognized() -> None:
    kinds = {name: is_counter_based(jax.random.key(0, impl=name).dtype) for name in ("threefry2x32", "rbg", "unsafe_rbg")}
    assert kinds == {"threefry2x32": True, "rbg": False, "unsafe_rbg": False}
    with jax.threefry_partitionable(False):
        assert not is_counter_based(jax.random.key(0).dtype)


def loss(w: Any, x: Any, key: Any) -> Any:
    h = x @ w
    return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0.0) ** 2)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a program and of its nested programs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, (core.Jaxpr, core.ClosedJaxpr))):
            if isinstance(inner, (core.Jaxpr, core.ClosedJaxpr)):
                yield from equations(getattr(inner, "jaxpr", inner))


def planned(impl: str) -> tuple[Plan, tuple]:
    args = (jnp.ones((16, 32)), jnp.arange(1024 * 16.0).reshape(1024, 16), jax.random.key(0, impl=impl))
    return optimize(loss, *args, machine=Machine.grid(1, 8, "a100"), progress=False).frontier[-1], args


@pytest.mark.parametrize(("impl", "drawn"), [("threefry2x32", 1024 * 32 // 8), ("rbg", 1024 * 32)])
def test_a_device_draws_its_own_part(impl: str, drawn: int) -> None:
    """A mask is partitioned over all devices. A generator that is not counter-based draws all of it on every device."""
    plan, args = planned(impl)
    run = jax.make_jaxpr(plan)(*plan.shard(*args))
    sizes = [v.aval.size for e in equations(run.jaxpr) if e.primitive.name in ("threefry2x32", "random_bits") for v in e.outvars]
    assert max(sizes) == drawn
    np.testing.assert_allclose(plan(*plan.shard(*args)), loss(*args), rtol=1e-5)


@pytest.mark.parametrize(("impl", "each"), [("threefry2x32", 1 / 4), ("rbg", 1.0)])
def test_replicated_draws_are_priced_as_such(impl: str, each: float) -> None:
    """Each of four devices that partition a mask has this fraction of the work."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    body = close(jax.make_jaxpr(lambda key: jax.random.bits(key, (64,)))(key))
    (cut,) = (c for c in choices(body) if c.results == (partitioned(0),))
    assert part_of_work(cut.divided, 4) == each
