"""The part of a report that needs a plan's function, as a value that the plan's file keeps.

The file has no programs, so that costs, memory and a simulated step cannot be computed from it: they are kept as they are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unity.base.errors import PlanFileError
from unity.explain.tables import blocked
from unity.pcg.ir.graph import PCG
from unity.plan.plan import Plan
from unity.plan.summary import Summary, differentiated_in
from unity.report import costs, steps
from unity.report.picture import Interned, Rows
from unity.report.steps import ReportStep
from unity.report.timeline import on_page, timeline_of
from unity.search.cost.prediction import predict
from unity.search.memory.backend import backend_of
from unity.search.memory.memory import predict_memory


@dataclass(frozen=True, eq=False)
class Live:
    """The figures of a report that need the plan's function.

    Attributes:
        steps: the steps between the captured program and the plan.
        costs: the costs of every node of the planned graph in words, by identity.
        memory: the live buffers of a device at its peak.
        timeline: a simulated step, with the labels of its bars.
        blocked: the dimensions that could not be split.
    """

    steps: tuple[ReportStep, ...]
    costs: Mapping[int, Rows]
    memory: dict[str, Any]
    timeline: dict[str, Any]
    blocked: list[str]


def live_of(plan: Plan, planned: Summary) -> Live:
    """Return the figures of a plan, given its summary."""
    differentiated = differentiated_in(plan)
    prediction = predict(plan.pcg, plan.machine, differentiated)
    memory = predict_memory(plan.pcg, differentiated, plan._made.search.training, backend_of(plan.machine))
    description = costs.exact_costs(prediction, memory, plan.pcg.axes)
    by_node = {id(node): description(node) for node, _ in plan.pcg.walk()}
    return Live(
        steps.steps_between(plan, planned.rules), by_node, costs.live_memory(memory), timeline_of(plan.simulate()), blocked(plan)
    )


def to_json(live: Live, graph: PCG) -> dict[str, Any]:
    """Return the figures as data for a plan's file. `graph` is the planned one."""
    interned = Interned()
    numbers = [interned.of(live.costs[id(node)]) for node, _ in graph.walk()]
    rest = {"memory": live.memory, "timeline": live.timeline, "blocked": live.blocked}
    return {"steps": steps.to_json(live.steps), "costs": {"rows": interned.data(), "nodes": numbers}, **rest}


def from_json(data: Any, graph: PCG) -> Live:
    """Return the figures that `to_json` described, for the same graph.

    Raises:
        PlanFileError: the data are damaged.
    """
    try:
        rows, numbers = data["costs"]["rows"], data["costs"]["nodes"]
        pairs = zip(graph.walk(), numbers, strict=True)
        by_node = {id(node): [(str(term), str(text)) for term, text in rows[k]] for (node, _), k in pairs}
        memory, timeline, blocked = dict(data["memory"]), dict(data["timeline"]), list(data["blocked"])
        on_page(timeline, Interned())
        return Live(steps.from_json(data["steps"]), by_node, memory, timeline, blocked)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise PlanFileError(f"what is kept for its report is damaged: {type(error).__name__}: {error}") from error
