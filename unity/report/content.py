"""All that a report shows, as one JSON document: of a plan, or of a plan's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unity.base.formatting import duration, size
from unity.diff.regions import step_seconds
from unity.machine.machine import Machine
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.parallel.serial_view import erased
from unity.plan.strategies import from_json
from unity.plan.summary import RuleUse, Summary, captured_summary_of, summary_of
from unity.report import arguments, costs
from unity.report.drawing import Drawing, drawing_of
from unity.report.frames import Told, frames_of, told
from unity.report.live import Live, live_of
from unity.report.live import from_json as live_again
from unity.report.picture import Legend, Rows, Said, Shared, legend_of, picture
from unity.report.points import points_of
from unity.report.timeline import on_page
from unity.search.session import Candidate, unbeaten

if TYPE_CHECKING:
    from unity.plan.plan import Plan

LIVE = "This plan's file does not hold it. With its function it is shown: unity report FILE MODULE:FUNCTION, or unity.load."


@dataclass(frozen=True, eq=False)
class Source:
    """What a report is made of. `live`: none where a plan's file lacks it."""

    captured: Summary
    planned: Summary
    machine: Machine
    serial: PCG
    chosen: Candidate
    candidates: Sequence[Candidate]
    exact: bool
    whole: bool = True  # the candidates are the frontier, and not some points of it
    live: Live | None = None


def of_plan(plan: Plan) -> Source:
    """A plan, with everything that can be said of it."""
    planned, points = summary_of(plan), plan._made.points
    live = live_of(plan, planned)
    return Source(captured_summary_of(plan), planned, plan.machine, plan.serial, plan.candidate, *points, live)


def of_file(path: str | Path) -> Source:
    """What `plan.save` wrote. The function is not needed. Raises PlanError if it is no plan, or damaged."""
    from unity.plan.plan_file import read, reading, summaries

    data = read(path)
    captured, planned = summaries(path, data)
    serial = erased(planned.graph)
    with reading(path, "machine"):
        machine = Machine.from_json(data["machine"])
    with reading(path, "points"):
        chosen, *candidates = from_json(serial, machine.axes, data)
        points = candidates, bool(data["exact"]), bool(data["whole"])
    with reading(path, "report"):
        live = live_again(data["report"], planned.graph) if "report" in data else None
    return Source(captured, planned, machine, serial, chosen, *points, live)


def content(source: Source) -> dict[str, Any]:
    """The document. Where something cannot be had, it has a text that says so."""
    shared = Shared()
    legend = legend_of(source.planned.graph)
    said, more = _exactly(source.live, shared) if source.live is not None else _roughly(source)
    return {
        "title": source.planned.name,
        "machine": str(source.machine.name),
        "figures": _figures(source),
        "legend": legend.data(),
        **_frames(source, legend, said, shared),
        "frontier": _frontier(source, shared),
        "collectives": costs.collectives(source.planned.talk),
        "lines": costs.lines(source.captured, source.planned),
        "arguments": arguments.rows(source.planned.graph),
        "mesh": [[a.name, a.size, source.machine.levels[a.level].name] for a in source.planned.graph.axes],
        "rules": [_use(u) for u in (*source.planned.rules, *source.planned.applications)],
        **more,
        "shared": shared.data(),
    }


def _exactly(live: Live, shared: Shared) -> tuple[Said, dict[str, Any]]:
    more = {"memory": live.memory, "timeline": on_page(live.timeline, shared), "blocked": live.blocked}
    return lambda node: live.costs[id(node)], more


def _roughly(source: Source) -> tuple[Said, dict[str, Any]]:
    kinds = arguments.kinds(source.planned.graph)
    whole, here = source.planned.memory, sum(k.here for k in kinds)
    rest = whole - here
    parts = [["arguments", here, size(here)], ["gradients, optimizer, what is kept and worked on", rest, size(rest)]]
    memory = {"whole": [whole, size(whole)], "parts": parts, "less": [], "rows": [], "missing": LIVE}
    return costs.on_average(source.planned), {"memory": memory, "timeline": {"missing": LIVE}, "blocked": []}


def _frontier(source: Source, shared: Shared) -> dict[str, Any]:
    """The points that are known. Of some points only, those that the plan itself beats are left out."""
    points = source.candidates if source.whole else unbeaten([*source.candidates, source.chosen])
    return {"points": points_of(source.serial, points, source.chosen, shared), "exact": source.exact, "whole": source.whole}


def _figures(source: Source) -> list[list[str]]:
    """The figures at the head: what, how much, and what it was before."""
    one, plan = source.captured, source.planned
    compute, talk = step_seconds(plan)
    many = sum(t.count for t in plan.talk)
    return [
        ["one step", duration(plan.time), f"one device alone: {duration(one.time)}"],
        ["computing", duration(compute), "on every device"],
        ["communicating", duration(talk), f"{many} collective{'' if many == 1 else 's'}"],
        ["memory on a device", size(plan.memory), f"of {size(source.machine.device.memory)}; one device alone: {size(one.memory)}"],
        ["devices", str(plan.devices), source.machine.device.name],
        ["operators", str(len(plan.graph)), f"{len(one.graph)} were captured"],
    ]


def _frames(source: Source, legend: Legend, said: Said, shared: Shared) -> dict[str, Any]:
    """The steps, and the pictures that they show. Folded pictures of all, and the plan's own unfolded."""
    between = None if source.live is None else source.live.steps
    steps = list(told(frames_of(source.captured, source.planned, between)))
    of_rules = partial(costs.of_rules, uses=source.planned.rules)

    def fully(node: Node) -> Rows:
        return [*said(node), *of_rules(node)]

    drawings: dict[int, Drawing] = {}
    pictures: list[dict[str, Any]] = []
    frames = []
    for step in steps:
        graph = step.frame.graph
        if id(graph) not in drawings:
            drawings[id(graph)] = drawing_of(graph, fold=True)
            about = fully if graph is source.planned.graph else of_rules
            pictures.append(picture(drawings[id(graph)], graph, shared, legend, step.keys, about))
        frames.append(_frame(step, len(pictures) - 1, drawings[id(graph)].places))
    graph, whole = steps[-1].frame.graph, None
    if pictures[-1]["folded"]:
        whole = picture(drawing_of(graph, fold=False), graph, shared, legend, steps[-1].keys, fully)
    return {"frames": frames, "pictures": pictures, "whole": whole}


def _frame(step: Told, number: int, places: Mapping[int, int]) -> dict[str, Any]:
    """`marked`: leaves of the picture, by number."""
    f = step.frame
    marked = sorted({places[k] for k in step.marked if k in places})
    uses = [_use(u) for u in f.uses]
    return {"title": f.title, "says": f.says, "picture": number, "uses": uses, "marked": marked, "difference": step.difference}


def _use(u: RuleUse) -> dict[str, Any]:
    return {"rule": u.rule, "says": u.says, "times": u.times, "lines": [*u.lines, *(f"along {x}" for x in u.over)]}
