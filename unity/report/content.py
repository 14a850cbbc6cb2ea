"""The content of a report as one JSON document, for a plan or a plan's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from unity.base.documents import plain
from unity.base.formatting import duration, size
from unity.machine.machine import Machine
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.parallel.serial_view import serial_graph
from unity.plan.argument_kinds import argument_kinds
from unity.plan.files.plan_file import read, reading, summaries
from unity.plan.files.strategies import candidates
from unity.plan.plan import Plan
from unity.plan.summary import HOST_TRANSFER, RuleUse, Summary, captured_summary_of, step_seconds, summary_of
from unity.report import arguments, costs
from unity.report.drawing import Drawing, drawing_of
from unity.report.frontier_points import points_of
from unity.report.function_figures import FunctionFigures, figures_of, restored
from unity.report.picture import Description, Interned, Legend, Rows, legend_of, picture
from unity.report.steps import ComparedStep, all_steps, compared
from unity.report.timeline import on_page
from unity.search.session import Candidate, unbeaten

MISSING = "This plan's file does not hold it. With its function it is shown: unity report FILE MODULE:FUNCTION, or unity.load."


@dataclass(frozen=True, eq=False)
class Source:
    """The data of a report.

    Attributes:
        captured: the summary of the captured program.
        planned: the summary of the plan.
        machine: the machine.
        serial: the serial graph, which the candidates' assignments are for.
        chosen: the plan's own strategy.
        candidates: the frontier's points.
        exact: whether the frontier is exact.
        whole: whether the candidates are the whole frontier, and not some of its points.
        figures: the figures that need the plan's function; None if a plan's file lacks them.
    """

    captured: Summary
    planned: Summary
    machine: Machine
    serial: PCG
    chosen: Candidate
    candidates: Sequence[Candidate]
    exact: bool
    whole: bool = True
    figures: FunctionFigures | None = None

    def in_user_names(self) -> Source:
        """Return the data with the names of mesh axes that users see; `chosen` and the candidates stay over those of the search."""
        planned = self.planned.in_user_names()
        figures = None if self.figures is None else self.figures.of(self.planned.graph, planned.graph)
        return replace(self, planned=planned, figures=figures)


def of_plan(plan: Plan) -> Source:
    """Return the data of a plan's report."""
    program = plan.program
    captured, planned = captured_summary_of(program), summary_of(program)
    points, figures = program.family.points, figures_of(plan)
    return Source(captured, planned, plan.inspect.machine, program.serial, program.candidate, *points, figures)


def of_file(path: str | Path) -> Source:
    """Return the data of a report from a plan's file, without the plan's function.

    Raises:
        PlanError: the file does not hold a plan, or is damaged.
    """
    document = read(path)
    captured, planned = summaries(path, document)
    machine, serial = document.machine, serial_graph(planned.graph)
    with reading(path):
        chosen, *others = candidates(serial, machine.axes, document)
    with reading(path, ".report"):
        figures = None if document.report is None else restored(document.report, planned.graph)
    return Source(captured, planned, machine, serial, chosen, others, document.exact, document.whole, figures)


def content(source: Source) -> dict[str, Any]:
    """Return the document of a report. A part without data has a text that says how to get it."""
    interned, names, source = Interned(), source.planned.names, source.in_user_names()
    legend = legend_of(source.planned.graph)
    levels = [level.name for level in source.machine.levels]
    description, parts = _function_content(source.figures, interned) if source.figures is not None else _file_content(source)
    return {
        "title": source.planned.name,
        "machine": str(source.machine.name),
        "figures": _figures(source),
        "legend": legend.data(),
        **_steps(source, legend, description, interned),
        "frontier": _frontier(source, interned, names),
        "collectives": costs.collectives(source.planned.talk),
        "lines": costs.lines(source.captured, source.planned),
        "arguments": arguments.rows(source.planned.graph),
        "mesh": [[a.name, a.size, " and ".join(levels[at] for at, _ in a.extent)] for a in source.planned.graph.axes],
        "rules": [_rule(u) for u in (*source.planned.rules, *source.planned.applications)],
        **parts,
        "shared": interned.data(),
    }


def _function_content(figures: FunctionFigures, interned: Interned) -> tuple[Description, dict[str, Any]]:
    """Return a function that describes a node, and the parts of a report that need the plan's function."""
    parts = {
        "memory": plain(figures.memory),
        "timeline": on_page(figures.timeline, interned),
        "blocked": list(figures.blocked),
        "gap": figures.gap,
    }
    return lambda node: figures.costs[id(node)], parts


def _file_content(source: Source) -> tuple[Description, dict[str, Any]]:
    """Return what `_function_content` returns, as far as a plan's file tells without the function."""
    kinds = argument_kinds(source.planned.graph)
    total, arguments_size = source.planned.memory, sum(k.here for k in kinds)
    rest = total - arguments_size
    parts = [
        ["arguments", arguments_size, size(arguments_size)],
        ["gradients, optimizer, what is kept and worked on", rest, size(rest)],
    ]
    memory = {"whole": [total, size(total)], "parts": parts, "less": [], "rows": [], "missing": MISSING}
    return costs.average_costs(source.planned), {"memory": memory, "timeline": {"missing": MISSING}, "blocked": [], "gap": ""}


def _frontier(source: Source, interned: Interned, names: AxisNames) -> dict[str, Any]:
    """Return the known points, with the names of their mesh axes.

    If they are only a part of the frontier, those that the plan itself dominates are left out.
    """
    points = source.candidates if source.whole else unbeaten([*source.candidates, source.chosen])
    return {
        "points": points_of(source.serial, points, source.chosen, interned, names),
        "exact": source.exact,
        "whole": source.whole,
    }


def _figures(source: Source) -> list[list[str]]:
    """Return the figures at the head of the page: name, value, comparison."""
    captured, plan = source.captured, source.planned
    compute, talk = step_seconds(plan)
    collectives = sum(t.count for t in plan.talk if t.kind != HOST_TRANSFER)
    transfers = sum(t.count for t in plan.talk if t.kind == HOST_TRANSFER)
    sent = f"{collectives} collective{'' if collectives == 1 else 's'}"
    sent += f", {transfers} transfers to the host and back" if transfers else ""
    return [
        ["one step", duration(plan.time), f"one device alone: {duration(captured.time)}"],
        ["computing", duration(compute), "on every device"],
        ["communicating", duration(talk), sent],
        [
            "memory on a device",
            size(plan.memory),
            f"of {size(source.machine.device.memory)}; one device alone: {size(captured.memory)}",
        ],
        ["devices", str(plan.devices), source.machine.device.name],
        ["operators", str(len(plan.graph)), f"{len(captured.graph)} were captured"],
    ]


def _steps(source: Source, legend: Legend, description: Description, interned: Interned) -> dict[str, Any]:
    """Return the steps with their pictures, which fold repeated layers, and the plan's own picture unfolded."""
    between = None if source.figures is None else source.figures.steps
    comparisons = list(compared(all_steps(source.captured, source.planned, between)))
    rules_of = partial(costs.rules_of_node, uses=source.planned.rules)

    def full_description(node: Node) -> Rows:
        return [*description(node), *rules_of(node)]

    drawings: dict[int, Drawing] = {}
    pictures: list[dict[str, Any]] = []
    step_data = []
    for comparison in comparisons:
        graph = comparison.step.graph
        if id(graph) not in drawings:
            drawings[id(graph)] = drawing_of(graph, fold=True)
            describe = full_description if graph is source.planned.graph else rules_of
            pictures.append(picture(drawings[id(graph)], graph, interned, legend, comparison.keys, describe))
        step_data.append(_step(comparison, len(pictures) - 1, drawings[id(graph)].places))
    graph, unfolded = comparisons[-1].step.graph, None
    if pictures[-1]["folded"]:
        unfolded = picture(drawing_of(graph, fold=False), graph, interned, legend, comparisons[-1].keys, full_description)
    return {"frames": step_data, "pictures": pictures, "whole": unfolded}


def _step(comparison: ComparedStep, number: int, places: Mapping[int, int]) -> dict[str, Any]:
    """Return a step as data. `marked` has the numbers of leaves of the picture."""
    step = comparison.step
    marked = sorted({places[k] for k in comparison.marked if k in places})
    uses = [_rule(u) for u in step.uses]
    return {
        "title": step.title,
        "says": step.says,
        "picture": number,
        "uses": uses,
        "marked": marked,
        "difference": comparison.difference,
    }


def _rule(u: RuleUse) -> dict[str, Any]:
    return {"rule": u.rule, "says": u.says, "times": u.times, "lines": [*u.lines, *(f"along {x}" for x in u.over)]}
