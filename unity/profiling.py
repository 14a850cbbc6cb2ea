"""Measurement of a model's operators before it is planned, as `unity profile` runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unity.exec.measure.local_machine import where
from unity.exec.measure.plan_profile import MeasurementTask, Tasks, fill, missing, tasks_of_domains, tasks_of_graph
from unity.machine.machine import Machine
from unity.machine.profiles.store import Store
from unity.optimize import optimize
from unity.plan.plan import Plan
from unity.search.cost.assembly import assemble

ROUNDS = 3  # each round's measurements change which plans are best, and so which operators the next one must measure


@dataclass(frozen=True)
class ProfilingProgress:
    """The progress of a profiling run."""

    round: int
    count: int  # operators that this round measures
    task: MeasurementTask | None = None  # the last one measured
    problem: str = ""  # why the task could not be measured


def profile(
    fn: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    devices: Sequence[Any],
    store: Store,
    every: bool = False,
) -> Iterator[ProfilingProgress]:
    """Measure the operators of a model that a profile lacks, one after another, and store each measurement at once.

    The first round measures the operators of the plans on the frontier, and operators that are split in one way along all axes, as
    by data parallelism. Later rounds measure the operators of the plans that are best by the measurements so far.

    Args:
        fn: the function.
        args: its arguments.
        options: further options of `unity.optimize`.
        devices: the devices to measure on.
        store: the profiles to add to.
        every: whether to measure all operators that the search considers, in one round.
    """
    place, machine = where(devices), Machine.local(devices)
    for number in range(1 if every else ROUNDS):
        machine = machine.with_profile(store.profile(place))
        options = {"progress": False, **options, "machine": machine}
        plan = optimize(fn, *args, **options)
        tasks, _ = missing(tasks_of_plan(plan, not number, every), machine.profile, machine)
        if not tasks:
            break
        yield ProfilingProgress(number, len(tasks))
        for task, problem in fill(tasks, devices, store, place):
            yield ProfilingProgress(number, len(tasks), task, problem)


def tasks_of_plan(plan: Plan, domains: bool, every: bool) -> Tasks:
    """Return the operators whose times a plan's choice depends on.

    Args:
        plan: the plan.
        domains: whether to include operators from the domains of the search, of the captured and of the rewritten program, besides
            those of the plans on the frontier.
        every: whether to include all of the domains' operators, not only those that are split in one way along all axes.
    """
    family, search = plan.program.family, plan.program.family.search
    operators: Tasks = {}
    if domains:
        operators |= tasks_of_domains(search.assembled, every)
    original = family.original
    if domains and original is not family.captured:
        operators |= tasks_of_domains(assemble(original.graph, original.differentiated, search.machine, search.training), every)
    differentiated = search.differentiated if search.training.backward else ()
    for point in plan.frontier:
        operators |= tasks_of_graph(point.program.pcg, differentiated)
    return operators
