"""Dropout in stages: the bits of the whole batch, whatever part of it a stage has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.random import threefry2x32_p
from stepped import stepped

from unity import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.stages import SCHEDULES, TWO_BW, Mixed
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.plan.stream import Stream
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.transforms.pipelining import PipelineSource, pipelined
from unity.transforms.pipelining.sample_bits import sample_bits

TREE = Machine.grid(2, 4)
LAYERS, WIDTH = 4, 8


def dropped(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0.0)


def with_key_of_each_layer(params, x, key):
    def step(carry, own):
        w, key = own
        return carry + dropped(key, jnp.tanh(carry @ w)), None

    return (lax.scan(step, x, (params, jax.random.split(key, LAYERS)))[0] ** 2).mean()


def with_key_folded_and_rematerialized(params, x, key):
    @jax.checkpoint
    def step(carry, own):
        w, number = own
        y = carry.reshape(-1, WIDTH)
        return carry + dropped(jax.random.fold_in(key, number), jnp.tanh(y @ w)).reshape(carry.shape), None

    return (lax.scan(step, x, (params, jnp.arange(LAYERS)))[0] ** 2).mean()


def arguments(batch=16, seq=3):
    rng = np.random.default_rng(0)
    params, x = (jnp.asarray(rng.normal(size=s) / 3, jnp.float32) for s in ((LAYERS, WIDTH, WIDTH), (batch, seq, WIDTH)))
    return params, x, jax.random.key(7)


def planned(fn, args, along, rounds, kind) -> Plan:
    captured = capture(fn, *args)
    made = pipelined(PipelineSource(captured), 0, 0, along, rounds, kind)
    search = Search(made.after.graph, captured.differentiated, TREE, Training())
    return Plan(PlanFamily(fn, made.before, search, 0.0, transformations=(made,)), search.fastest)


@pytest.mark.parametrize(
    ("fn", "kind"), [*((with_key_of_each_layer, kind) for kind in SCHEDULES), (with_key_folded_and_rematerialized, TWO_BW)]
)
def test_masks_are_those_of_the_function(fn, kind):
    args = arguments()
    plan = planned(fn, args, TREE.axes[1:], 2, kind)
    found, checked = (
        ((stream := Stream(plan)).finish(stream.start(*args)), plan.check()) if kind == TWO_BW else stepped(plan, *args)
    )
    step = jax.jit(jax.value_and_grad(fn))
    wanted, (other, _) = step(*args), step(args[0], args[1], jax.random.key(8))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    assert abs(other - wanted[0]) > 1e-3 * abs(wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-4, atol=1e-6)
    assert all(line.predicted == line.compiled for line in checked.lines)


@given(st.integers(1, 5), st.integers(1, 40), st.sampled_from([8, 16, 32]), st.integers(0, 100))
@settings(max_examples=fewer(8), deadline=None)
def test_bits_by_number_are_those_of_the_whole(samples, size, width, seed):
    key = jax.random.key(seed)
    wanted = jax.random.bits(key, (samples, size), f"uint{width}")
    found = jax.jit(sample_bits, static_argnums=(1, 2))(key, width, (samples, size), jnp.arange(samples, dtype=jnp.uint32))
    np.testing.assert_array_equal(found, wanted)


def test_counters_beyond_a_word_are_right():
    """Of more than 2^32 elements, those of the last sample."""
    key, size, samples = jax.random.key(3), 1 << 20, 1 << 14
    data = jax.random.key_data(key)
    number = samples - 1
    found = sample_bits(key, 32, (1, size), jnp.asarray([number], jnp.uint32))[0]
    start = number * size
    high, low = jnp.uint32(start >> 32), jnp.arange(size, dtype=jnp.uint32) + jnp.uint32(start % (1 << 32))
    one, other = threefry2x32_p.bind(data[0], data[1], jnp.full(size, high), low)
    np.testing.assert_array_equal(found, one ^ other)


def test_other_generators_and_positions_are_refused():
    def by_position(params, x, key):
        return lax.scan(lambda c, w: (jnp.tanh(c @ w) * jnp.arange(c.shape[0])[:, None, None], None), x, params)[0].sum()

    for fn, key in ((by_position, jax.random.key(0)), (with_key_of_each_layer, jax.random.key(0, impl="rbg"))):
        program = PipelineSource(capture(fn, *arguments()[:2], key))
        with pytest.raises(Mixed, match="where a sample stands"):
            pipelined(program, 0, 0, TREE.axes[:1], 2)
