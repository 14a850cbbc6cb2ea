"""The figures of a report that need a plan's function: costs, memory, a simulated step, and the steps to the plan.

A plan's file has no programs, from which these figures are computed. So the file has the figures themselves, as they are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from unity.base.documents import Misfit, at
from unity.explain.brief import gap_in_words, simulated_gap_in_words
from unity.explain.tables import blocked
from unity.pcg.ir.graph import PCG
from unity.plan.files.document import CostsRecord, MemoryTable, ReportRecord, TimelineTable
from unity.plan.plan import Plan
from unity.report import costs, steps
from unity.report.picture import Rows
from unity.report.steps import ReportStep
from unity.report.timeline import timeline_of


@dataclass(frozen=True, eq=False)
class FunctionFigures:
    """The figures of a report that need the plan's function.

    Attributes:
        steps: the steps between the captured program and the plan.
        costs: the costs of every node of the planned graph in words, by identity.
        memory: the live buffers of a device at its peak.
        timeline: a simulated step, with the labels of its bars.
        blocked: the dimensions that could not be split.
        gap: the most by which the best sharding of the program may be faster, in words; empty without a bound.
    """

    steps: tuple[ReportStep, ...]
    costs: Mapping[int, Rows]
    memory: MemoryTable
    timeline: TimelineTable
    blocked: tuple[str, ...]
    gap: str

    def of(self, graph: PCG, copy: PCG) -> FunctionFigures:
        """Return the figures of a graph for a copy of it."""
        pairs = zip(copy.walk(), graph.walk(), strict=True)
        return replace(self, costs={id(node): self.costs[id(original)] for (node, _), (original, _) in pairs})


def figures_of(plan: Plan) -> FunctionFigures:
    """Return the figures of a plan."""
    description = costs.exact_costs(plan.program.prediction, plan.program.memory, plan.program.axis_names)
    by_node = {id(node): description(node) for node, _ in plan.program.pcg.walk()}
    gaps = [gap_in_words(plan), "" if plan.program.candidate.simulated is None else simulated_gap_in_words(plan)]
    return FunctionFigures(
        steps.steps_between(plan),
        by_node,
        costs.live_memory(plan.program.memory),
        timeline_of(plan.inspect.simulate()),
        tuple(blocked(plan)),
        "; ".join(filter(None, gaps)),
    )


def record_of(figures: FunctionFigures, graph: PCG) -> ReportRecord:
    """Return the figures for a plan's file. `graph` is the planned one."""
    rows: dict[tuple[tuple[str, str], ...], int] = {}
    numbers = tuple(rows.setdefault(tuple(figures.costs[id(node)]), len(rows)) for node, _ in graph.walk())
    step_records, cost_records = steps.record_of(figures.steps), CostsRecord(tuple(rows), numbers)
    return ReportRecord(step_records, cost_records, figures.memory, figures.timeline, figures.blocked, figures.gap)


def restored(record: ReportRecord, graph: PCG) -> FunctionFigures:
    """Return the figures of a record, for the same graph. Raises Misfit if they do not fit it."""
    numbers, rows, labels = record.costs.nodes, record.costs.rows, record.timeline.labels
    nodes = [node for node, _ in graph.walk()]
    if len(numbers) != len(nodes) or any(k >= len(rows) for k in numbers):
        raise Misfit(f"expected the number of one of {len(rows)} rows for each of {len(nodes)} nodes", ".costs.nodes")
    if any(label >= len(labels) for row in record.timeline.rows for *_, label in row.bars):
        raise Misfit(f"a bar has none of the {len(labels)} labels", ".timeline.rows")
    by_node = {id(node): list(rows[k]) for node, k in zip(nodes, numbers, strict=True)}
    with at(".steps"):
        return FunctionFigures(steps.restored(record.steps), by_node, record.memory, record.timeline, record.blocked, record.gap)
