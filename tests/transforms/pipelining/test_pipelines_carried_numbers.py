"""Scans that carry counters, keys and other values without samples are pipelines, too; those that depend on samples are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import unity
from unity.base.errors import InfeasibleError
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PIPELINE
from unity.transforms.pipelining.independent_carries import carries_of
from unity.transforms.pipelining.micro_batches import scans, with_usable_scans
from unity.transforms.pipelining.pipelining import AlikePipelining, PipelineSource

TREE = unity.Machine.grid(2, 4)
BATCH, WIDTH = 16, 8


def layer(h, w):
    return h + jax.nn.softmax(h @ w)


def counter(w, x, y):
    """The number of the layer scales it."""
    carry = lax.scan(lambda c, own: ((c[0] + 1, layer(c[1], own) / (1 + c[0])), None), (jnp.int32(0), x), w)[0]
    return ((carry[1] - y) ** 2).mean() + carry[0]


def splitting_a_key(w, x, y):
    def step(carry, own):
        key, mine = jax.random.split(carry[1])
        return (layer(carry[0], own) * jax.random.bernoulli(mine, 0.8, x.shape), key), None

    return ((lax.scan(step, (x, jax.random.key(0)), w)[0][0] - y) ** 2).mean()


def indexed(w, x, y):
    return ((lax.fori_loop(0, len(w), lambda k, h: layer(h, w[k]) * jnp.cos(k.astype(h.dtype)), x) - y) ** 2).mean()


def real_numbers(w, x, y):
    """A decay that is learned, a mean of weights that adds up, and a row that no step changes, all with gradients."""

    def step(carry, own):
        h, decay, total, row = carry
        return (layer(h, own) * decay + row, decay * 0.9, total + own.mean(), row), None

    h, decay, total, row = lax.scan(step, (x, w[0, 0, 0], 0.0, w[0, 0]), w)[0]
    return ((h - y) ** 2).mean() + decay + total + row.sum()


@jax.custom_vjp
def counted(h, count, w):
    return layer(h, w) / (1 + count), count + 1


def counted_backward(residuals, cotangents):
    h, count, w = residuals
    dh, dw = jax.vjp(lambda h, w: layer(h, w) / (1 + count), h, w)[1](cotangents[0])
    return dh, None, dw


counted.defvjp(lambda h, count, w: (counted(h, count, w), (h, count, w)), counted_backward)


def in_calls(w, x, y):
    """Checkpoints, calls with rules and branches are single equations; what they count and decay has no samples all the same."""

    @jax.checkpoint
    def called(carry, own):
        h, count, decay, key = carry
        h, count = counted(h, count, own)
        key, mine = jax.random.split(key)
        h, decay = lax.cond(count > 2, lambda h, d: (h * d, d * 0.9), lambda h, d: (h + d, d * 0.8), h, decay)
        return h * jax.random.bernoulli(mine, 0.8, h.shape), count, decay, key

    h, count, decay, _ = lax.scan(
        lambda carry, own: (called(carry, own), None), (x, jnp.int32(0), w[0, 0, 0], jax.random.key(0)), w
    )[0]
    return ((h - y) ** 2).mean() + decay * count


def of_as_many_features(w, x, y):
    """Rows that change places and a matrix, with dimensions of as many features as there are samples."""

    def step(carry, own):
        h, row, other, matrix = carry
        return (layer(h, own + matrix) + row, 0.9 * other, row + own[0], 0.9 * matrix + 0.1 * own), None

    h, row, other, matrix = lax.scan(step, (x, w[0, 0], w[0, 1], w[0]), w)[0]
    return ((h - y) ** 2).mean() + (row * other).sum() + (matrix**2).sum()


def arguments(layers=4, width=WIDTH):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=s) / 3, jnp.float32) for s in ((layers, width, width), (BATCH, width), (BATCH, width)))


@pytest.mark.parametrize("fn", [counter, splitting_a_key, indexed, real_numbers, in_calls, of_as_many_features])
def test_values_without_samples_are_read_by_step(fn, tmp_path):
    args = arguments(5 if fn is counter else 4, BATCH if fn is of_as_many_features else WIDTH)
    shape = unity.PipelineShape(2, 4)
    plan = unity.optimize(fn, *args, argnums=(0, 1), machine=TREE, pipeline=shape, search="captured", progress=False)
    found, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(*args) for f in (plan, fn))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, wanted)
    assert plan.check().agrees(0.0)
    assert plan.program.pipelining is not None
    plan.program.pipelining.check()
    plan.files.save(tmp_path / "plan.json")
    assert unity.load(tmp_path / "plan.json", fn, *args).time == plan.time


def test_layers_written_out_that_split_a_key_are_rolled_into_a_pipeline():
    def written_out(w, x, y, key):
        for own in w:
            key, mine = jax.random.split(key)
            x = layer(x, own) * jax.random.uniform(mine, (1, WIDTH))
        return ((x - y) ** 2).mean()

    w, x, y = arguments(6)
    args = list(w), x, y, jax.random.PRNGKey(0)
    source = PipelineSource(capture(written_out, *args))
    assert source.layers is not None
    assert {count for count, _ in source.candidates(2)} == {4, len(source.layers)}
    shape = unity.PipelineShape(2, 4)
    plan = unity.optimize(written_out, *args, machine=TREE, pipeline=shape, search="captured", progress=False)
    found, wanted = (jax.jit(jax.value_and_grad(f))(*args) for f in (plan, written_out))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, wanted)
    assert isinstance(plan.program.pipelining, AlikePipelining)


@pytest.mark.parametrize("fn", [counter, in_calls])
def test_lines_stay(fn):
    """Layers that were traced twice, as there are five on two stages, still know their lines."""
    shape = unity.PipelineShape(2, 4)
    plan = unity.optimize(fn, *arguments(5), machine=TREE, pipeline=shape, search="captured", progress=False)
    (node,) = [n for n in plan.program.pcg.nodes if n.kind == PIPELINE]
    assert node.inside is not None
    kinds = {"remat", "custom_vjp", "cond"} if fn is in_calls else {"dot_general"}
    sources = {n.kind: n.source for n, _ in node.inside.walk() if n.kind in kinds}
    assert sources.keys() == kinds
    assert all("test_pipelines_carried_numbers.py" in line for line in sources.values())


def test_only_scans_that_become_usable_are_changed():
    def fn(w, x):
        def mixed(carry, own):
            return (layer(carry[0] - carry[0].mean(0), own), carry[1] + 1), None

        return lax.scan(mixed, (x, 0), w)[0][0].sum()

    captured = capture(fn, *arguments()[:2])
    assert with_usable_scans(captured) is captured
    (reason,) = scans(captured)[1]
    assert "reduce_sum at" in reason


def test_carries_depend_on_others_over_several_steps():
    def fn(w, x):
        def step(carry, own):
            h, a, b, c = carry
            return (layer(h, own), b, c, a + 1.0), None

        return lax.scan(step, (x, 0.0, 1.0, 2.0), w)[0]

    (scan,) = [e for e in capture(fn, *arguments()[:2]).body.equations if e.name == "scan"]
    assert carries_of(scan).sources == [{0}, {1, 2, 3}, {1, 2, 3}, {1, 2, 3}]
    assert carries_of(scan).independent(BATCH) == [1, 2, 3]


def test_a_number_that_depends_on_samples_is_refused_by_its_line():
    def penalized(w, x, y):
        h, total = lax.scan(lambda c, own: ((layer(c[0], own), c[1] + (c[0] ** 2).mean()), None), (x, 0.0), w)[0]
        return ((h - y) ** 2).mean() + 0.1 * total

    with pytest.raises(InfeasibleError, match=r"carries float32\[\], the result of add at test_pipelines_carried.*one for each"):
        unity.optimize(penalized, *arguments(), machine=TREE, pipeline=unity.PipelineShape(2, 4), search="captured", progress=False)


def test_the_operator_in_a_checkpoint_is_named():
    @jax.checkpoint
    def penalized(carry, own):
        return layer(carry[0], own), carry[1] + (carry[0] ** 2).mean()

    def fn(w, x, y):
        h, total = lax.scan(lambda carry, own: (penalized(carry, own), None), (x, 0.0), w)[0]
        return ((h - y) ** 2).mean() + 0.1 * total

    (reason,) = scans(capture(fn, *arguments()))[1]
    assert "carries float32[], the result of add at" in reason


def test_a_refusal_says_which_dimensions_are_taken_for_samples():
    def fn(w, x, y):
        h, row = lax.scan(lambda c, own: ((layer(c[0], own) + c[1], c[1] + c[0].mean(0)), None), (x, y[0]), w)[0]
        return ((h - y) ** 2).mean() + row.sum()

    (reason,) = scans(capture(fn, *arguments(width=BATCH)))[1]
    assert "taking float32[16,16] and float32[16] to have samples in their first dimensions" in reason
