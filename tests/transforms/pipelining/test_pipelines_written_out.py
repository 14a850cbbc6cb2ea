"""Layers that are written out are rolled if they differ in numbers or keys alone, and if each is a single call."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pipelined_models import ALONG, TREE, close
from stepped import stepped

from unity.pcg.capture.capture import capture
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED
from unity.pcg.parallel.stages import ONE_F_ONE_B
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.transforms.pipelining import PipelineSource, pipelined

COUNT, WIDTH, BATCH, WORDS = 4, 6, 16, 11


def residual(x, w):
    return x + jnp.tanh(x @ w)


def dropped(key, x):
    return jnp.where(jax.random.bernoulli(key, jnp.float32(0.8), x.shape), x / 0.8, 0)


def with_own_keys(x, ws, key):
    for w in ws:
        key, own = jax.random.split(key)
        x = residual(dropped(own, x), w)
    return x


def looped(layer):
    """A Python loop over layers, functions of what they carry, their weights, their number and a key."""

    def layers(x, ws, key):
        for j, w in enumerate(ws):
            x = layer(x, w, j, key)
        return x

    return layers


def numbered(x, w, j, key):
    return residual(x, w) * (1 + 0.1 * j)


def twice_numbered(x, w, j, key):
    return 0.9 * residual(x / 2, w) + (j % 2) * jnp.sin(x * 1.0)


LAYERS: dict[str, Any] = {
    "checkpoints": looped(lambda x, w, j, key: jax.checkpoint(residual)(x, w)),
    "checkpoints in branches": looped(lambda x, w, j, key: x + jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)),
    "checkpoints of calls": looped(lambda x, w, j, key: jax.jit(jax.checkpoint(jax.jit(residual)))(x, w)),
    "checkpoints with keys": looped(
        lambda x, w, j, key: jax.checkpoint(lambda x, w, key: residual(dropped(key, x), w))(x, w, jax.random.fold_in(key, j))
    ),
    "checkpoints with numbers": looped(lambda x, w, j, key: jax.checkpoint(lambda x, w: numbered(x, w, j, key))(x, w)),
    "checkpoints that fold keys": looped(
        lambda x, w, j, key: jax.checkpoint(lambda x, w, key: residual(dropped(jax.random.fold_in(key, j), x / 2), w))(x, w, key)
    ),
    "folded keys": looped(lambda x, w, j, key: residual(dropped(jax.random.fold_in(key, j), x), w)),
    "split keys": with_own_keys,
    "numbers": looped(numbered),
    "equal numbers": looped(lambda x, w, j, key: residual(x, w) * 1),
    "several numbers": looped(twice_numbered),
    "a frozen layer": looped(lambda x, w, j, key: residual(x, lax.stop_gradient(w) if j == 1 else w)),
}


def arguments():
    rng = np.random.default_rng(0)
    params = {
        "words": jnp.asarray(rng.normal(size=(WORDS, WIDTH))),
        "layers": list(jnp.asarray(rng.normal(size=(COUNT, WIDTH, WIDTH)))),
    }
    return params, jnp.asarray(rng.integers(WORDS, size=BATCH)), jax.random.key(3)


def model(layers):
    return lambda params, words, key: (layers(params["words"][words], params["layers"], key) ** 2).mean()


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_the_functions_and_traffic_is_the_plans(name):
    fn = model(LAYERS[name])
    with jax.enable_x64(True):
        args = arguments()
        captured = capture(fn, *args)
        source = PipelineSource(captured)
        assert source.layers is not None
        assert len(source.layers) == COUNT
        made = pipelined(source, COUNT, 0, ALONG[2], 2, ONE_F_ONE_B)
        search = Search(made.after.graph, captured.differentiated, TREE, Training())
        plan = Plan(PlanFamily(fn, made.before, search, 0.0, transformations=(made,)), search.fastest)
        step, checked = stepped(plan, *args)
        close(step, jax.jit(jax.value_and_grad(fn))(*args), 1e-10)
        plan.program.check_derivation()
    assert all(line.predicted == line.compiled for line in checked.lines), checked


@pytest.mark.parametrize("name", [name for name in LAYERS if "checkpoints" in name])
def test_checkpoints_stay_in_the_layers(name):
    with jax.enable_x64(True):
        source = PipelineSource(capture(model(LAYERS[name]), *arguments()))
    assert source.layers is not None
    assert not set(source.layers.step.primitives).isdisjoint(REMATERIALIZED)
    (scan,) = [n for n in source.rolled(COUNT).captured.graph.nodes if n.kind == "scan"]
    assert scan.inside is not None
    assert any(n.kind == "remat" for n in scan.inside.nodes)


def test_a_number_is_no_variable():
    """One layer is multiplied by a number, the others by an argument."""

    def fn(ws, by, x):
        for j, w in enumerate(ws):
            x = residual(x, w) * (2.0 if j == 4 else by)
        return (x**2).mean()

    args = [jnp.ones((WIDTH, WIDTH))] * 5, jnp.ones(()), jnp.ones((BATCH, WIDTH))
    run = PipelineSource(capture(fn, *args)).layers
    assert run is None or len(run) == COUNT
