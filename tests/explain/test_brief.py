"""A plan in words: every weight and input, the figures of `explain`, and names of levels instead of axes."""

import io
import re

import jax
import jax.numpy as jnp
import pytest

import unity
from unity.base.formatting import duration
from unity.pcg.parallel.axis_names import AxisNames

GRID = unity.Machine.grid(4, 12, "a100")  # axes n0 n1 of size 2, d0 of size 3, d1 d2 of size 2


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (range(5), "all 48 devices"),
        ((0, 1), "node (4)"),
        ((2, 3, 4), "device (12)"),
        ((0, 2, 3, 4), "node_a (2 of node's 4) × device (12)"),
        ((2, 4), "device_a·device_c (6 of device's 12)"),
    ],
)
def test_axes_are_named_by_level(axes, words):
    assert AxisNames.of(GRID.axes, GRID.named_levels, [axes]).in_words(axes) == words


def loss(params, x):
    for w in params["layers"]:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def test_a_plan_says_where_its_arguments_are_and_what_is_sent():
    layers = {"layers": [struct(64, 64)] * 4}
    pins = [unity.pin("params['layers'][*]", jax.sharding.PartitionSpec("device"))]
    machine = unity.Machine.grid(2, 4, "a100")
    plan = unity.optimize(loss, layers, struct(65536, 64), machine=machine, constraints=pins, progress=False)
    first, *rows = repr(plan).splitlines()
    assert repr(plan) == str(plan)
    assert first.startswith("loss on a100-2x4, predicted: ")
    assert first.endswith("on each of 8 devices")
    assert "  weights  dimension 0 over device (4): args[0]['layers'][*], 65.54 kB in all" in rows
    assert "  inputs   dimension 0 over all 8 devices: args[1], 16.78 MB in all" in rows
    assert any(re.match(r"  sent     \S+ over .+: .+ in .+", row) for row in rows)


def test_one_device_sends_nothing():
    plan = unity.optimize(loss, {"layers": [struct(8, 8)]}, struct(8, 8), machine=unity.Machine.grid(1, 1, "a100"), progress=False)
    assert "whole: args[1], 256 B in all" in str(plan)
    assert "sent" not in str(plan)


def test_the_simulated_step_is_explained_where_devices_overlap():
    def explained(machine):
        pins = [unity.pin("params['layers'][*]", jax.sharding.PartitionSpec("device"))]
        params = {"layers": [struct(64, 64)]}
        plan = unity.optimize(loss, params, struct(256, 64), machine=machine, constraints=pins, progress=False)
        plan.explain(file := io.StringIO())
        return plan, file.getvalue()

    plan, text = explained(unity.Machine.grid(1, 4, "a100"))
    step = plan.inspect.simulate()
    waiting = 1 - plan.program.prediction.computing / step.makespan
    assert f"simulated: {duration(step.makespan)} a step with overlap; " in text
    assert f"devices wait for {waiting:.0%} of it (overlap=True looks for less: docs: search#overlap)" in text
    assert "simulated:" not in explained(unity.Machine.grid(1, 1, "a100"))[1]


@pytest.mark.parametrize("options", [{"search": "fsdp"}, {"search": "unity-rules"}, {"objective": "memory"}, {"overlap": True}])
def test_overlap_is_proposed_only_where_it_may_lead_to_another_plan(options):
    machine = unity.Machine.grid(1, 4, "a100")
    layers = {"layers": [struct(2048, 2048)]}
    plan = unity.optimize(loss, layers, struct(4096, 2048), machine=machine, budget=4, progress=False, **options)
    plan.explain(file := io.StringIO())
    assert "devices wait for" in file.getvalue()
    assert "overlap=True" not in file.getvalue()
