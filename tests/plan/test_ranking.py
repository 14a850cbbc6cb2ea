"""Plans told apart by simulating and running them: what is chosen, when, and what is said of it."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import gpt

import unity
from unity.exec.measure.trial import relative
from unity.plan.step import step_of
from unity.planning.ranking import CLEARLY, NEAR, RUN, SIMULATED
from unity.search.cost.cost import Training

MACHINE = unity.Machine.grid(2, 2, "v100", intra=(150e9, 1.9e-6), inter=(6.25e9, 4e-6))
MODEL = gpt()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(unity.Machine, "local", lambda: MACHINE)


def planned(**options):
    return unity.optimize(MODEL.loss, MODEL.params, MODEL.batch, search="captured", progress=False, **options)


@cache
def predicted():
    """The plan that nothing is run for; it is searched for once."""
    found = planned()
    assert found.inspect.tried == ()
    return found


def running(monkeypatch, seconds):
    """Plans take these seconds, in the order in which they are run."""
    monkeypatch.setattr("unity.planning.ranking.relative", lambda steps: [seconds(k) for k in range(len(steps))])


def test_what_runs_fastest_is_taken(monkeypatch):
    running(monkeypatch, lambda k: 1.0 - 0.1 * k)
    found = planned(measure=True)
    first, *others = found.inspect.tried
    assert (first.predicted, first.memory) == (found.time, found.memory)
    assert first.measured == min(t.measured for t in found.inspect.tried if t.measured is not None) < 1
    assert found.time > predicted().time
    assert sum(t.measured is not None for t in found.inspect.tried) == RUN
    assert len(others) < SIMULATED
    assert all(t.predicted <= NEAR * predicted().time for t in found.inspect.tried)


def test_what_is_not_clearly_faster_does_not_take_the_place_of_the_predicted_best(monkeypatch):
    running(monkeypatch, lambda k: 1.0 if k == 0 else CLEARLY + 0.001)
    found = planned(measure=True)
    assert found.time == predicted().time
    assert found.inspect.tried[0].measured == 1.0


def test_those_that_are_run_are_the_best_simulated(monkeypatch):
    running(monkeypatch, lambda k: 1.0)
    ran, others = [], []
    for t in planned(measure=True).inspect.tried[1:]:
        (others if t.measured is None else ran).append(t.simulated)
    assert len(ran) == RUN - 1
    assert max(ran) <= min(others, default=np.inf)


def test_what_the_devices_cannot_run_is_not_chosen(monkeypatch):
    running(monkeypatch, lambda k: 1.0)
    best = predicted()
    monkeypatch.setattr("unity.planning.ranking.can_run", lambda plan: plan.time != best.time)
    found = planned(measure=True)
    assert found.time > best.time
    assert sum(t.measured is not None for t in found.inspect.tried) == RUN
    assert {t.measured for t in found.inspect.tried if t.predicted == best.time} == {None}


def test_if_they_can_run_none_it_is_the_predicted_best(monkeypatch):
    running(monkeypatch, lambda k: pytest.fail("nothing is run"))
    monkeypatch.setattr("unity.planning.ranking.can_run", lambda plan: False)
    assert planned(measure=True).time == predicted().time


def test_a_limit_holds_for_what_is_tried(monkeypatch):
    running(monkeypatch, lambda k: 1.0 - 0.1 * k)
    limit = 0.9 * predicted().memory
    found = planned(measure=True, memory_limit=limit)
    assert all(t.memory <= limit for t in found.inspect.tried)


def test_it_is_explained_and_the_cache_gives_the_same_plan(monkeypatch, capsys):
    running(monkeypatch, lambda k: 1.0 - 0.1 * k)
    found = planned(measure=True)
    found.explain()
    assert f"of {len(found.inspect.tried)} plans that were simulated, {RUN} were run" in capsys.readouterr().out
    running(monkeypatch, lambda k: pytest.fail("nothing is run again"))
    again = planned(measure=True)
    assert (again.time, again.memory) == (found.time, found.memory)


@pytest.mark.parametrize("options", [{"machine": MACHINE}, {"objective": "memory"}])
def test_it_is_refused_where_there_is_nothing_to_run_on_or_no_time_to_compare(options):
    with pytest.raises(ValueError, match="measure=True runs plans on the devices of this process"):
        planned(measure=True, **options)


def test_plans_are_really_run():
    f = jnp.ones

    def loss(params, x):
        return jnp.mean((jax.nn.relu(x @ params["a"]) @ params["b"]) ** 2)

    args = {"a": f((32, 64)), "b": f((64, 32))}, f((64, 32))
    plan = unity.optimize(loss, *args, progress=False, measure=True)
    assert all(t.measured is None or t.measured > 0 for t in plan.inspect.tried)
    assert plan.inspect.tried[0].measured is not None
    np.testing.assert_allclose(plan(*args), loss(*args), rtol=1e-6)
    one, other = relative([step_of(plan, Training())] * 2)
    assert one > 0
    assert other > 0
