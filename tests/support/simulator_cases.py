"""Random task graphs and changes, for the simulator's tests. Names say nothing about which tasks depend on which."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from unity.baselines.flexflow.delta.simulation import Change
from unity.search.simulator import Resource, TaskGraph, TimedTask

# equal times make ties, none makes levels, and one that vanishes beside any other is none where it is added
SECONDS = st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.0, 0.5, 1e-17, 1 / 3]) | st.floats(0, 10)


@dataclass(frozen=True)
class Case:
    """A task graph, and all names that its tasks may have, each after those that it may wait for."""

    names: tuple[int, ...]
    graph: TaskGraph


def a_task(draw: st.DrawFn, earlier: list[int], devices: int) -> TimedTask:
    before = draw(st.lists(st.sampled_from(earlier), max_size=3, unique=True)) if earlier else []
    return TimedTask(draw(st.integers(0, devices - 1)), draw(SECONDS), tuple(before))


@st.composite
def task_graphs(draw: st.DrawFn) -> Case:
    devices = draw(st.integers(1, 4))
    names = draw(st.lists(st.integers(0, 1000), min_size=2, max_size=30, unique=True))
    tasks: dict[int, TimedTask] = {}
    for name in names[: draw(st.integers(0, len(names)))]:
        tasks[name] = a_task(draw, list(tasks), devices)
    shuffled = draw(st.permutations(list(tasks)))
    resources = tuple(Resource(f"device {d}", "compute") for d in range(devices))
    return Case(tuple(names), TaskGraph({n: tasks[n] for n in shuffled}, resources))


@st.composite
def changes(draw: st.DrawFn, case: Case, tasks: dict[int, TimedTask]) -> Change:
    """Takes some tasks away, replaces some, adds some; what waited for a task that is gone waits for it no more."""
    gone = draw(st.sets(st.sampled_from(sorted(tasks)), max_size=4)) if tasks else set()
    found: dict[int, TimedTask | None] = dict.fromkeys(gone)
    left = {n: t for n, t in tasks.items() if n not in gone}
    for name, task in left.items():
        if not gone.isdisjoint(task.before):
            found[name] = task._replace(before=tuple(p for p in task.before if p not in gone))
    for name in draw(st.lists(st.sampled_from(case.names), max_size=5, unique=True)):
        if name not in gone:
            earlier = case.names[: case.names.index(name)]
            there = [n for n in earlier if n in left or found.get(n) is not None]
            found[name] = a_task(draw, there, len(case.graph.devices))
    return found


TIES, ANY = (0.0, 0.5, 1.0, 1.0, 2.0), (0.0, 1e-17, 1 / 3, 1.0, 2.7, 4.1)


def rolled_graph(rng: random.Random, count: int = 60, devices: int = 3) -> Case:
    """A larger graph, in which tasks wait for such as were named shortly before them."""
    names, tasks = rng.sample(range(10 * count), count), {}
    resources = tuple(Resource(f"device {d}", "compute") for d in range(devices))
    for k, name in enumerate(names):
        if rng.random() < 0.8:
            tasks[name] = _rolled_task(rng, [n for n in names[max(0, k - 12) : k] if n in tasks], devices)
    return Case(tuple(names), TaskGraph(tasks, resources))


def rolled_change(rng: random.Random, case: Case, tasks: dict[int, TimedTask]) -> Change:
    """A few tasks of a larger graph that go, change, or are new."""
    gone = {n for n in tasks if rng.random() < 0.02}
    left = tasks.keys() - gone
    found: dict[int, TimedTask | None] = dict.fromkeys(gone)
    for name in left:
        if not gone.isdisjoint(tasks[name].before):
            found[name] = tasks[name]._replace(before=tuple(p for p in tasks[name].before if p not in gone))
    for k, name in enumerate(case.names):
        if name not in gone and rng.random() < 0.04:
            earlier = [n for n in case.names[max(0, k - 12) : k] if n in left]
            found[name] = _rolled_task(rng, earlier, len(case.graph.devices))
    return found


def _rolled_task(rng: random.Random, earlier: list[int], devices: int) -> TimedTask:
    before = rng.sample(earlier, min(len(earlier), rng.choice((0, 1, 1, 1, 2, 3, 8))))
    return TimedTask(rng.randrange(devices), rng.choice(rng.choice((TIES, ANY))), tuple(before))


EXACT = (0.0, 0.25, 1.0, 1.0, 1.5, 3.0)  # times that are added without rounding


def layered_graph(rng: random.Random, layers: int = 24, devices: int = 4) -> TaskGraph:
    """Chains of tasks, one for each device, that wait for each other now and then; tasks that nobody waits for, some shortcuts."""
    tasks: dict[int, TimedTask] = {}
    ends: list[tuple[int, ...]] = [()] * devices
    older: list[tuple[int, ...]] = ends
    for k in range(layers):
        for d in range(devices):
            also = older[d] if rng.random() < 0.2 else ()
            tasks[100 * k + d] = TimedTask(d, rng.choice(EXACT), tuple(dict.fromkeys((*ends[d], *also))))
            if rng.random() < 0.2:
                tasks[100 * k + 20 + d] = TimedTask(rng.randrange(devices), rng.choice(EXACT), (100 * k + d,))
        older, ends = ends, [(100 * k + d,) for d in range(devices)]
        if rng.random() < 0.4:
            tasks[100 * k + 50] = TimedTask(devices, 0.0, tuple(n for names in ends for n in names))
            ends = [(100 * k + 50,)] * devices
    resources = (*(Resource(f"device {d}", "compute") for d in range(devices)), Resource("barriers", "barrier"))
    return TaskGraph(tasks, resources)


def layered_change(rng: random.Random, graph: TaskGraph) -> Change:
    """Other times and devices for a few tasks, in a layer or two; a task between others, or one less that nobody waits for."""
    tasks, devices = graph.tasks, len(graph.devices) - 1
    waited = {p for task in tasks.values() for p in task.before}
    layers = rng.sample(sorted({n // 100 for n in tasks}), rng.choice((1, 2)))
    found: dict[int, TimedTask | None] = {}
    for n, task in tasks.items():
        if n // 100 not in layers or task.device == devices or rng.random() < 0.5:
            continue
        new = 100 * (n // 100) + 60 + rng.randrange(30)
        if n not in waited and rng.random() < 0.3:
            found[n] = None
        elif task.before and new not in tasks and new not in found and rng.random() < 0.3:
            found[new] = TimedTask(rng.randrange(devices), rng.choice(EXACT), task.before[:1])
            found[n] = task._replace(before=(*task.before[1:], new))
        else:
            found[n] = task._replace(device=rng.randrange(devices), seconds=rng.choice(EXACT))
    return found


def changed(tasks: dict[int, TimedTask], change: Change) -> dict[int, TimedTask]:
    """The tasks after a change."""
    put = {n: t for n, t in change.items() if t is not None}
    return {n: t for n, t in {**tasks, **put}.items() if change.get(n, t) is not None}
