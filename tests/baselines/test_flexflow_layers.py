"""FlexFlow's layers: they compute the same function in the same time as their operators, with fewer operators to place."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from serial_graph import evaluate
from small_models import MODELS, Small, f

from benchmarks.models import tiny
from benchmarks.models.unrolled import rnnlm_unrolled
from unity.baselines.flexflow.delta.simulation import makespan
from unity.baselines.flexflow.layers import layers
from unity.baselines.flexflow.strategy.configs import every_config, on_one
from unity.baselines.flexflow.strategy.operators import Operators, operators
from unity.baselines.flexflow.strategy.strategy import Strategy
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.capture.clustering import clusters
from unity.pcg.capture.heavy_operators import constants
from unity.search.simulator import Topology

TWO = Machine.grid(1, 2, "p100")


def both(small) -> tuple[Operators, Operators]:
    """The operators of a model as captured, and as layers."""
    with jax.enable_x64(True):
        found = [capture(small.loss, small.params, small.batch, clustering=how) for how in (clusters, layers)]
    fine, coarse = (operators(c.graph, c.differentiated, Topology.uniform(TWO)) for c in found)
    return fine, coarse


def whole(o: Operators) -> np.ndarray:
    """Seconds forward and backward of all operators, each on one device."""
    return np.sum(list(o.whole.values()), axis=0)


def programs(o: Operators) -> list[tuple[str, ...]]:
    """The primitives of each operator."""
    return [body.primitives for k in o.numbers if (body := o.nodes[k].body) is not None]


@pytest.mark.parametrize("name", ["cnn", "lstm"])
def test_layers_compute_the_same(name: str) -> None:
    small = MODELS[name]()
    with jax.enable_x64(True):
        leaves = jax.tree.leaves((small_models.arrays(small.params), small_models.arrays(small.batch)))
        expected, got = (jax.jit(partial(evaluate, o.graph))(leaves) for o in both(small))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_layers_are_made_of_operators_and_take_no_longer(name: str) -> None:
    """Less, where a residual sum joins the normalization that comes before it: that spares passes over memory."""
    small = MODELS[name]()
    with jax.enable_x64(True):
        body = capture(small.loss, small.params, small.batch).body
    constant = constants(body)
    found, made = layers(body, constant), {*body.inputs, *constant}
    for layer in found:
        made.update(v for i in layer.members for v in body.equations[i].results)
        assert all(a in made for i in layer.members for a in body.equations[i].operands if isinstance(a, int)), "users come after"
    homes = {i: k for k, layer in enumerate(found) for i in layer.members}
    assert len(homes) == sum(len(layer.members) for layer in found)
    for cluster in clusters(body, constant):
        assert len({homes.pop(i) for i in cluster.members}) == 1
    assert not homes
    fine, coarse = both(small)
    assert len(coarse.numbers) <= len(fine.numbers)
    assert (whole(coarse) <= whole(fine) * (1 + 1e-9)).all()


def test_a_step_of_an_lstm_layer_is_one_operator_with_the_cost_of_its_parts() -> None:
    steps = 5
    fine, coarse = both(rnnlm_unrolled(hidden=16, vocab=61, steps=steps, batch=8))
    cells = [p for p in programs(coarse) if p.count("dot_general") == 2]
    assert len(cells) >= 2 * steps
    assert sum("tanh" in p for p in cells) == 2 * steps, "a first step reads a copy of the constant state, which is split with it"
    assert len(coarse.numbers) < len(fine.numbers) / 2
    np.testing.assert_allclose(whole(coarse), whole(fine), rtol=1e-9)


def test_layers_are_those_counted_in_papers() -> None:
    """FlexFlow's table 4: a 12-layer AlexNet. Five convolutions, three products, three poolings, a soft-max."""
    _, coarse = both(tiny("alexnet"))
    assert len(coarse.numbers) == 12


@cache
def mlp() -> tuple[Operators, Operators]:
    def loss(params: dict, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jax.nn.relu(x @ params["a"]) @ params["b"]))

    return both(Small(loss, {"a": f(512, 1024), "b": f(1024, 256)}, f(512, 512)))


@settings(max_examples=fewer(25))
@given(data=st.data())
def test_a_strategy_of_layers_takes_as_long_as_that_of_their_operators_on_the_same_devices(data: st.DataObject) -> None:
    """Without a bias, whose gradient a layer has with the product's, and not before."""
    fine, coarse = mlp()
    assert [p[0] for p in programs(coarse)][:2] == ["dot_general"] * 2
    configs = {k: data.draw(st.sampled_from(list(every_config(coarse.nodes[k], 2)))) for k in coarse.numbers}
    following = iter(configs.values())
    own, now = {}, None
    for k in fine.numbers:
        if fine.nodes[k].kind == "dot_general" or not fine.nodes[k].tensors[0].shape:
            now = next(following)
        assert now is not None
        own[k] = now
    assert makespan(Strategy(coarse, configs).graph) == pytest.approx(makespan(Strategy(fine, own).graph), rel=1e-6)


def test_on_one_device_a_network_takes_the_time_of_its_layers() -> None:
    for o in mlp():
        alone = Strategy(o, {k: on_one(o.nodes[k]) for k in o.numbers})
        assert makespan(alone.graph) == pytest.approx(whole(o).sum(), rel=1e-6)
