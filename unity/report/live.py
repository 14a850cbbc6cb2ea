"""What of a report only a plan with its function can say, as a value that the plan's file keeps.

The file holds no programs, so that costs, memory and a step in time cannot be found again from it; they are kept as they are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unity.base.errors import PlanFileError
from unity.pcg.ir.graph import PCG
from unity.plan.summary import Summary, differentiated_in
from unity.report import costs, steps
from unity.report.frames import Frame
from unity.report.picture import Rows, Shared
from unity.report.timeline import on_page, timeline_of
from unity.search.cost.prediction import predict
from unity.search.memory.backend import backend_of
from unity.search.memory.memory import predict_memory

if TYPE_CHECKING:
    from unity.plan.plan import Plan


@dataclass(frozen=True, eq=False)
class Live:
    """The steps between the captured program and the plan; what every node of the planned graph costs, by identity; the memory by
    holder; a step in time, with the texts of its bars; what could not be split."""

    steps: tuple[Frame, ...]
    costs: Mapping[int, Rows]
    memory: dict[str, Any]
    timeline: dict[str, Any]
    blocked: list[str]


def live_of(plan: Plan, planned: Summary) -> Live:
    """All of it, of a plan and its summary."""
    from unity.explain.tables import blocked

    differentiated = differentiated_in(plan)
    found = predict(plan.pcg, plan.machine, differentiated)
    memory = predict_memory(plan.pcg, differentiated, plan._made.search.training, backend_of(plan.machine))
    said = costs.exactly(found, memory, plan.pcg.axes)
    each = {id(node): said(node) for node, _ in plan.pcg.walk()}
    return Live(steps.steps_of(plan, planned.rules), each, costs.holders(memory), timeline_of(plan.simulate()), blocked(plan))


def to_json(live: Live, graph: PCG) -> dict[str, Any]:
    """As data for a plan's file. `graph`: the planned one."""
    shared = Shared()
    numbers = [shared.of(live.costs[id(node)]) for node, _ in graph.walk()]
    rest = {"memory": live.memory, "timeline": live.timeline, "blocked": live.blocked}
    return {"steps": steps.to_json(live.steps), "costs": {"rows": shared.data(), "nodes": numbers}, **rest}


def from_json(data: Any, graph: PCG) -> Live:
    """What `to_json` gave of the same graph. Raises PlanFileError if the data are anything else."""
    try:
        rows, numbers = data["costs"]["rows"], data["costs"]["nodes"]
        pairs = zip(graph.walk(), numbers, strict=True)
        each = {id(node): [(str(term), str(text)) for term, text in rows[k]] for (node, _), k in pairs}
        memory, timeline, blocked = dict(data["memory"]), dict(data["timeline"]), list(data["blocked"])
        on_page(timeline, Shared())
        return Live(steps.from_json(data["steps"]), each, memory, timeline, blocked)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise PlanFileError(f"what is kept for its report is damaged: {type(error).__name__}: {error}") from error
