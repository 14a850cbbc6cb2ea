"""Overlap in the objective: plans are chosen by their simulated step, where devices compute while they communicate."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import unity
from unity.machine.resharding_tables import Changes
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.cost import SiteCost, Training
from unity.search.cost.exposure import Exposure
from unity.search.cost.prediction import predict
from unity.search.cost.refinement import around
from unity.search.overlap import overlapping, simulated
from unity.search.session import Search
from unity.search.simulator import simulate

MACHINE = unity.Machine.grid(1, 8, "h100")


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def loss(params, x):
    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return jnp.mean(lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)


ARGUMENTS = {"up": f32(8, 8192, 32768), "down": f32(8, 32768, 8192)}, f32(32768, 8192)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def planned(machine=MACHINE, budget: int | None = 0, **options: Any):
    return unity.optimize(loss, *ARGUMENTS, machine=machine, budget=budget, progress=False, **options)


@cache
def plans():
    """The plan with the least sum, and the plan that is chosen by simulation."""
    return planned(), planned(overlap=True)


@cache
def search(training=True):
    captured = capture(loss, *ARGUMENTS, argnums=(0,) if training else ())
    return Search(captured.graph, captured.differentiated, MACHINE, Training(training))


def step(plan):
    return plan.inspect.simulate().makespan


def test_the_plan_has_the_shorter_simulated_step_and_the_option_the_lesser_sum():
    least, hidden = plans()
    assert least.time < hidden.time
    assert step(hidden) < 0.97 * step(least)
    assert least.time == pytest.approx(search().fastest.time)


@pytest.mark.parametrize("name", ["data-parallel", "fsdp", "megatron"])
def test_no_strategy_by_hand_has_a_shorter_simulated_step(name):
    assert step(plans()[1]) <= step(planned(search=name, budget=None))


def test_the_figures_of_the_plan_are_those_of_its_graph():
    hidden = plans()[1]
    assert hidden.time == pytest.approx(predict(hidden.program.pcg, MACHINE, hidden.program.family.differentiated).time)
    assert hidden.program.candidate.simulated == pytest.approx(step(hidden))


@pytest.mark.parametrize("part", [0.8, 1.01])
def test_under_a_memory_limit_all_strategies_that_are_compared_fit(part):
    limit = part * search().fastest.memory
    assert plans()[1].memory > limit
    best = search().under(limit)
    assert best is not None
    candidates = [s.candidate for s in overlapping(search(), best, limit)]
    assert candidates[0].assignment == best.assignment
    assert len(candidates) > 1
    assert all(c.memory <= limit for c in candidates)
    assert all(c.time >= best.time * (1 - 1e-9) for c in candidates)


def test_of_equal_simulated_steps_the_least_sum_stays(monkeypatch):
    monkeypatch.setattr(
        "unity.planning.ranking.overlapping", lambda *request: [replace(s, seconds=1.0) for s in overlapping(*request)]
    )
    plan = planned(overlap=True)
    assert plan.time == plans()[0].time
    assert plan.program.candidate.simulated == 1.0


def test_nothing_is_searched_again_where_nothing_waits_for_communication():
    alone = Search(search().graph, search().differentiated, MACHINE.alone, Training())
    assert len(overlapping(alone, alone.fastest, np.inf)) == 1


@pytest.mark.parametrize("part", [0.8, 1.01])
def test_other_strategies_have_the_seconds_of_all_of_their_communication(part):
    limit = part * search().fastest.memory
    best = search().under(limit)
    assert best is not None
    for other in overlapping(search(), best, limit)[1:]:
        graph = parallelize(search().graph, other.candidate.assignment)
        prediction = predict(graph, MACHINE, search().differentiated)
        assert other.candidate.time == other.summed == prediction.time
        assert other.computing == prediction.computing
        assert other.seconds == simulate(graph, MACHINE, search().differentiated).makespan
        assert prediction.computing <= other.seconds <= other.summed * (1 + 1e-9)


def test_gradients_alone_may_keep_the_links_busy():
    def images(params, x):
        for w in params["convolutions"]:
            x = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        x = jnp.mean(x.reshape(x.shape[0], 7, 8, 7, 8, -1), (2, 4)).reshape(x.shape[0], -1)
        for w in params["dense"]:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x**2)

    convolutions = [f32(3, 3, channels, 256) for channels in (16, *[256] * 7)]
    arguments = {"convolutions": convolutions, "dense": [f32(12544, 4096), f32(4096, 4096)]}, f32(256, 56, 56, 16)
    machine = unity.Machine.grid(8, 2, "v100")
    captured = capture(images, *arguments)
    conv = Search(captured.graph, captured.differentiated, machine, Training())
    data = unity.optimize(images, *arguments, machine=machine, search="data-parallel", progress=False)
    least, *others = overlapping(conv, conv.fastest, machine.device.memory)
    assert least.seconds > step(data)
    assert min(other.seconds for other in others) <= step(data)


def test_a_strategy_that_is_much_slower_is_not_refined(monkeypatch):
    refined = []
    monkeypatch.setattr("unity.search.overlap.around", lambda *request: refined.append(request) or around(*request))
    monkeypatch.setattr("unity.search.overlap.FAR", 0.0)
    best = search().fastest
    overlapping(search(), best, np.inf)
    assert len(refined) == 1  # around the best of all
    monkeypatch.undo()
    monkeypatch.setattr("unity.search.overlap.around", lambda *request: refined.append(request) or around(*request))
    overlapping(search(), best, np.inf)
    assert len(refined) > 2


def test_exposed_prices_are_parts_of_the_prices_of_communication_alone():
    one = np.ones((1, 1))
    changes = Changes(one, one, one, one, one > 0)
    exposure = Exposure(gathers=0.5, gradients=0.25, others=0.75)
    weight, other = exposure.of_changes(changes, True), exposure.of_changes(changes, False)
    assert [float(part.item()) for part in (weight.forward, weight.backward, weight.merged)] == [0.5, 0.25, 0.25]
    assert [float(part.item()) for part in (other.forward, other.backward, other.merged)] == [0.75] * 3
    assert weight.size == other.size == 1
    site = SiteCost(forward=one, backward=one, reduces=one, memory=one, once=one)
    assert exposure.of_site(site).time.item() == 2.75


def test_a_forward_pass_without_weights_is_planned_by_its_simulated_step():
    forward = search(training=False)
    candidates = overlapping(forward, forward.fastest, np.inf)
    assert len(candidates) <= 2
    assert all(s.seconds == simulated(forward, s.candidate).seconds for s in candidates)


def test_devices_that_do_one_thing_after_the_other_have_the_least_sum():
    cpu = replace(MACHINE, device=replace(MACHINE.device, name="cpu"), host=None)
    plan = planned(machine=cpu, overlap=True)
    assert plan.program.candidate.simulated is None
    assert plan.time == planned(machine=cpu).time


def test_files_the_cache_and_texts_keep_the_simulated_step(tmp_path):
    hidden, again = plans()[1], planned(overlap=True)
    cached = planned(overlap=True)
    assert again.program.candidate.assignment.axes == cached.program.candidate.assignment.axes
    assert hidden.program.pcg.key == again.program.pcg.key == cached.program.pcg.key
    assert cached.program.candidate.simulated == again.program.candidate.simulated == hidden.program.candidate.simulated
    hidden.files.save(tmp_path / "plan.json")
    loaded = unity.load(tmp_path / "plan.json", loss, *ARGUMENTS)
    assert loaded.program.candidate.simulated == hidden.program.candidate.simulated
    assert "simulated" in repr(loaded)
    assert "simulated" not in repr(plans()[0])


def test_the_gap_of_a_plan_that_hides_more_is_one_of_sums():
    least, hidden = plans()
    assert hidden.inspect.bound is not None
    assert hidden.inspect.bound <= least.time * (1 + 1e-9)
    assert hidden.inspect.gap == pytest.approx(hidden.time / hidden.inspect.bound - 1)
    assert repr(hidden).count("by the sum of its operators and collectives") == 1


def test_the_option_is_true_or_false():
    with pytest.raises(unity.OptionError, match="overlap"):
        planned(overlap="yes")
