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


def arguments(layers=4):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=s) / 3, jnp.float32) for s in ((layers, WIDTH, WIDTH), (BATCH, WIDTH), (BATCH, WIDTH)))


@pytest.mark.parametrize("fn", [counter, splitting_a_key, indexed, real_numbers])
def test_values_without_samples_are_read_by_step(fn, tmp_path):
    args = arguments(5 if fn is counter else 4)
    shape = unity.PipelineShape(2, 4)
    plan = unity.optimize(fn, *args, argnums=(0, 1), machine=TREE, pipeline=shape, search="captured", progress=False)
    found, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(*args) for f in (plan, fn))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, wanted)
    assert plan.check().agrees(0.0)
    assert plan.program.pipelining is not None
    plan.program.pipelining.check()
    plan.files.save(tmp_path / "plan.json")
    assert unity.load(tmp_path / "plan.json", fn, *args).time == plan.time


def test_lines_stay():
    """Layers that were traced twice, as there are five on two stages, still know their lines."""
    shape = unity.PipelineShape(2, 4)
    plan = unity.optimize(counter, *arguments(5), machine=TREE, pipeline=shape, search="captured", progress=False)
    (node,) = [n for n in plan.program.pcg.nodes if n.kind == PIPELINE]
    assert node.inside is not None
    (product,) = [n for n in node.inside.nodes if n.kind == "dot_general"]
    assert "test_pipelines_carried_numbers.py" in product.source


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
