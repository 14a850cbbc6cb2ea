"""Stages of different operators that nobody asked for: where they gain by prediction, or where nothing else fits; elsewhere not."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from unlike_models import mlp

import unity
from unity import Machine
from unity.transforms.pipelining.unlike import pipelining as module
from unity.transforms.pipelining.unlike.pipelining import Unlike

pytestmark = pytest.mark.usefixtures("own_cache")

OPTIONS: dict[str, Any] = {"progress": False, "search": "captured"}


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def weights(widths):
    return [(array(a, b), array(b)) for a, b in itertools.pairwise(widths)]


def narrow(params, x, labels):
    """Dense layers, wide ones but for the middle."""
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1).mean()


@pytest.fixture
def tried(monkeypatch):
    """The pipelines that are made."""
    made, original = [], module.unlike

    def noting(*args, **named):
        made.append(original(*args, **named))
        return made[-1]

    monkeypatch.setattr(module, "unlike", noting)
    return made


def test_where_links_are_slow_and_weights_are_packed_one_is_found(tried):
    args = weights((1024, 12288, 8192, 512, 8192, 10240, 1000)), array(4096, 1024), array(4096, dtype=jnp.int32)
    machine = Machine.grid(2, 2, device="v100", inter=(1e9, 1e-5))
    plan = unity.optimize(narrow, *args, **OPTIONS, machine=machine, pack=True)
    assert isinstance(plan.program.pipelining, Unlike)
    assert plan.program.pipelining.packing
    without = unity.optimize(narrow, *args, **OPTIONS, machine=machine, pack=True, pipelines=False)
    assert plan.time < 0.9 * without.time
    assert plan.inspect.simulate().makespan < 0.9 * without.inspect.simulate().makespan
    plan.program.check_derivation()
    count = len(tried)
    assert unity.optimize(narrow, *args, **OPTIONS, machine=machine).program.pipelining is None
    assert len(tried) == count  # weights' gradients would be added up over all devices in any case


def test_for_a_small_model_on_one_fast_node_none_is_tried(tried):
    args = weights((64, 256, 128, 512, 8)), array(64, 64), array(64, 8)
    plan = unity.optimize(mlp, *args, **OPTIONS, machine=Machine.grid(1, 4, device="a100"), pack=True)
    assert plan.program.pipelining is None
    assert not tried


def test_where_nothing_fits_one_is_found_that_does():
    args = weights((64, 256, 128, 512, 64, 8)), array(8192, 64), array(8192, 8)
    machine = Machine.grid(1, 4)
    without = unity.optimize(mlp, *args, **OPTIONS, machine=machine, pipelines=False, objective="memory")
    limit = 0.8 * without.memory
    with pytest.raises(unity.InfeasibleError):
        unity.optimize(mlp, *args, **OPTIONS, machine=machine, pipelines=False, memory_limit=limit)
    plan = unity.optimize(mlp, *args, **OPTIONS, machine=machine, memory_limit=limit)
    assert isinstance(plan.program.pipelining, Unlike)
    assert plan.memory <= limit
    assert plan.inspect.memory_timeline().peak < without.inspect.memory_timeline().peak
