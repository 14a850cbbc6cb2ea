"""Measuring a model's operators before it is planned: what `unity profile` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unity.exec.measure.local_machine import where
from unity.exec.measure.plan_profile import MeasurementTask, Wanted, fill, missing, of_domains, of_graph
from unity.machine.machine import Machine
from unity.machine.profiles.store import Store
from unity.optimize import optimize
from unity.plan.plan import Plan
from unity.search.cost.assembly import assemble

ROUNDS = 3  # what is measured changes which plans are best, and so what is to be measured


@dataclass(frozen=True)
class Step:
    """Where a run stands: the round, how many operators it measures, and the last one; why it could not be measured."""

    round: int
    count: int
    task: MeasurementTask | None = None
    problem: str = ""


def profile(
    fn: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    devices: Sequence[Any],
    store: Store,
    every: bool = False,
) -> Iterator[Step]:
    """Measures what is missing of a model's operators, one after another, and keeps each at once.

    Measured are the operators of the plans on the frontier and those that are parallel in one way along all axes, as data
    parallelism's are; of the next rounds, those of the plans that are best by what was measured. `every`: all that the search
    looks at. `options` are those of `unity.optimize`.
    """
    place, machine = where(devices), Machine.local(devices)
    for number in range(1 if every else ROUNDS):
        machine = machine.with_profile(store.profile(place))
        plan = optimize(fn, *args, **{"progress": False, **options, "machine": machine})
        rest, _ = missing(wanted(plan, not number, every), machine.profile, machine)
        if not rest:
            break
        yield Step(number, len(rest))
        for task, problem in fill(rest, devices, store, place):
            yield Step(number, len(rest), task, problem)


def wanted(plan: Plan, domains: bool, every: bool) -> Wanted:
    """The operators of a plan's frontier; and of the domains that it was searched in, as captured and as rewritten."""
    search = plan._made.search
    found: Wanted = {}
    if domains:
        found |= of_domains(search.assembled, every)
    before = plan._made.original
    if domains and before is not plan._made.captured:
        found |= of_domains(assemble(before.graph, before.differentiated, search.machine, search.training), every)
    differentiated = search.differentiated if search.training.backward else ()
    for point in plan.frontier:
        found |= of_graph(point.pcg, differentiated)
    return found
