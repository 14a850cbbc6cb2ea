"""Bounds of pipelines exclude none that is better, and most searches that would find nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import unity
from unity.machine.hardware import Level
from unity.machine.machine import Machine
from unity.plan.files import cache
from unity.search import session
from unity.transforms.pipelining import choose

LAYERS, WIDTH = 8, 64


def loss(layers, x):
    def step(x, layer):
        return x + jnp.tanh(x @ layer["up"]) @ layer["down"], None

    return jnp.mean(lax.scan(step, x, layers)[0] ** 2)


def plan(pods, nodes):
    """Return the plan on two pods of two nodes of two devices, with some bytes per second between pods and between nodes."""
    device = unity.Device("slow", {"float32": 1e9}, 10**9, 1e9, 0.5, 0.0)
    levels = Level("pod", 2, pods, 1e-5), Level("node", 2, nodes, 1e-5), Level("device", 2, 1e9, 1e-7)
    layers = {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)}
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (*layers.values(), (64, WIDTH))]
    args = dict(zip(layers, shapes, strict=False)), shapes[-1]
    return unity.optimize(loss, *args, machine=Machine("slow", device, levels), search="captured", progress=False)


@pytest.mark.parametrize(("pods", "nodes", "pipeline"), [(4e6, 4e7, True), (1e8, 5e8, False)])
def test_bounds_change_no_plan_and_save_searches(monkeypatch, pods, nodes, pipeline):
    searched, figure_of = [], choose._Choosing.figure_of
    monkeypatch.setattr(choose._Choosing, "figure_of", lambda self, p: searched.append(p) or figure_of(self, p))
    bounded, few = plan(pods, nodes), len(searched)
    searched.clear()
    monkeypatch.setattr(cache, "recall", lambda *_: None)
    monkeypatch.setattr(choose._Choosing, "bound", lambda *_: 0.0)
    assert plan(pods, nodes).time == bounded.time
    assert few < len(searched)
    assert (bounded.program.pipelining is not None) == pipeline


def test_pipelines_far_slower_than_the_plan_are_not_refined(monkeypatch):
    refinements, refined = [], session.refined
    monkeypatch.setattr(session, "refined", lambda *args: refinements.append(args) or refined(*args))
    monkeypatch.setattr(cache, "recall", lambda *_: None)
    monkeypatch.setattr(choose._Choosing, "bound", lambda *_: 0.0)
    monkeypatch.setattr(choose, "FAR", 1.0)
    first, few = plan(1e8, 5e8), len(refinements)
    refinements.clear()
    monkeypatch.setattr(choose, "FAR", float("inf"))
    assert plan(1e8, 5e8).time == first.time
    assert few < len(refinements)


def test_a_bound_is_no_figure_that_more_micro_batches_must_beat(monkeypatch):
    """They shorten what pipelines idle, so they are tried as long as figures fall."""
    tried = []

    def figure_of(choosing, pipelining):
        tried.append(pipelining.rounds)
        return choosing.best * (1.06 if pipelining.rounds < 8 else 1.04)

    monkeypatch.setattr(choose._Choosing, "bound", lambda self, pipeline, _: self.best * (pipeline.keywords["rounds"] == 2))
    monkeypatch.setattr(choose._Choosing, "figure_of", figure_of)
    plan(1e6, 2e6)
    assert tried[:3] == [4, 8, 16]


@pytest.mark.parametrize(("sizes", "levels"), [((1, 8), []), ((4, 2), [1]), ((2, 4, 2), [1, 2]), ((2, 1, 8), [1])])
def test_levels_are_joined_where_that_leaves_fewer(sizes, levels):
    """Levels of one unit take no time to search."""
    machine = Machine(
        "machine", Machine.grid(1, 1).device, tuple(Level(f"{n}l", size, 1e9, 1e-6) for n, size in zip("abc", sizes, strict=False))
    )
    nothing: Any = None
    choosing = choose._Choosing(nothing, nothing, machine)
    assert [len(joined.levels) for joined, _, _ in choosing.joined] == levels
