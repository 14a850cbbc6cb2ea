"""The steps from the captured program to the plan: the graph after every rule of the derivation, and the parallel graph.

The steps between the first and the last are computed from a plan with its function, and saved in the plan's file. For a file that
lacks them, every rule is shown on the captured program, at the lines that it was applied to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from unity.base.documents import Misfit, at
from unity.base.formatting import short
from unity.diff.matching import matching
from unity.pcg.ir.compact_json import folded_all, unfolded_all
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.parallel.serial_view import serial_graph
from unity.plan.files.document import StepRecord, StepsRecord
from unity.plan.plan import Plan
from unity.plan.summary import RuleUse, Summary, rule_use
from unity.transforms.branches import Branching
from unity.transforms.pipelining import Pipelining
from unity.transforms.rewriting import Rewriting

MAX_RULE_STEPS = 16  # if there are more rules, several that follow each other are one step


@dataclass(frozen=True, eq=False)
class ReportStep:
    """A step: its title, a text that explains it, the graph after it, and the rules that were applied."""

    title: str
    says: str
    graph: PCG
    uses: tuple[RuleUse, ...] = ()


def all_steps(captured: Summary, planned: Summary, between: Sequence[ReportStep] | None) -> tuple[ReportStep, ...]:
    """Return all steps, the captured program first.

    Args:
        captured: the summary of the captured program.
        planned: the summary of the plan.
        between: the steps between both, as `steps_between` returns them; without them, the rules are shown at their lines.
    """
    text = f"{len(captured.graph)} operators, as your function says them, on one device."
    first = ReportStep("As captured", text, captured.graph)
    middle = _steps_at_lines(captured, planned) if between is None else between
    devices = f"{planned.devices} devices" if planned.devices > 1 else "one device"
    text = f"Operators and arguments are placed on {devices}; every change of a value's sharding is an operator, too."
    return (first, *middle, ReportStep("Parallelized", text, planned.graph, planned.applications))


def _steps_at_lines(captured: Summary, planned: Summary) -> Iterator[ReportStep]:
    """Yield each rule on the captured program, then the serial graph, with the transformations that its nodes show."""
    for use in planned.rules:
        yield _rule_step((use,), captured.graph)
    kinds = {node.kind for node, _ in planned.graph.walk()}
    applied = [*([Rewriting] if planned.rules else []), *(t for t in (Pipelining, Branching) if t.kind in kinds)]
    if applied:
        yield ReportStep(Rewriting.title, " ".join(f"{t.effect}." for t in applied), serial_graph(planned.graph))


def _rule_step(uses: tuple[RuleUse, ...], graph: PCG) -> ReportStep:
    return ReportStep(", ".join(dict.fromkeys(u.rule for u in uses)), "\n".join(u.says for u in uses), graph, uses)


def steps_between(plan: Plan) -> tuple[ReportStep, ...]:
    """Return the steps of a plan between the captured program and the parallel one."""
    steps = list[ReportStep]()
    for t in plan.program.transformations:
        for graph, uses in t.graphs(MAX_RULE_STEPS):
            rules = tuple(dict.fromkeys(map(rule_use, uses)))
            steps.append(_rule_step(rules, graph) if rules else ReportStep(t.title, f"{t.effect}: {t}.", graph))
    return tuple(steps)


def record_of(steps: Sequence[ReportStep]) -> StepsRecord:
    """Return steps for a plan's file."""
    told = tuple(StepRecord(s.title, s.says, s.uses) for s in steps)
    return StepsRecord(told, folded_all(s.graph for s in steps))


def restored(record: StepsRecord) -> tuple[ReportStep, ...]:
    """Return the steps of a record. Raises Misfit if their graphs are damaged."""
    with at(".graphs"):
        graphs = unfolded_all(record.graphs)
    if len(graphs) != len(record.told):
        raise Misfit(f"expected a graph for each of {len(record.told)} steps", ".graphs.graphs")
    return tuple(ReportStep(s.title, s.says, graph, s.uses) for s, graph in zip(record.told, graphs, strict=True))


@dataclass(frozen=True, eq=False)
class ComparedStep:
    """A step compared with the one before it.

    Attributes:
        step: the step.
        keys: a number for every node, by identity. A matched node of the next step has the same number.
        marked: the nodes to highlight, by identity.
        difference: the operators that were added and removed, in words.
    """

    step: ReportStep
    keys: Mapping[int, int]
    marked: frozenset[int]
    difference: str


def compared(steps: Sequence[ReportStep]) -> Iterator[ComparedStep]:
    """Yield the steps, each compared with the one before it."""
    fresh, old = count(), _NodeKeys()
    before: PCG | None = None
    for step in steps:
        if step.graph is before:
            yield ComparedStep(step, old.keys, frozenset(_nodes_at_lines(step)), "")
            continue
        new = _NodeKeys()
        _number(before, step.graph, old.keys, new, fresh)
        marked = frozenset() if before is None or step.graph.axes else frozenset(new.added | new.changed)
        difference = _difference(before, step.graph, len(new.changed)) if before is not None else ""
        yield ComparedStep(step, new.keys, marked, difference)
        before, old = step.graph, new


@dataclass
class _NodeKeys:
    """The numbers of a graph's nodes, by identity; the added nodes; and those that compute or read something else than before."""

    keys: dict[int, int] = field(default_factory=dict)
    added: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)


def _number(before: PCG | None, after: PCG, old: Mapping[int, int], new: _NodeKeys, fresh: Iterator[int]) -> None:
    """Number the nodes of a graph and of its nested graphs. Matched nodes keep their number."""
    partner = {j: i for i, j in matching(before, after).items()} if before is not None else {}
    for j, node in enumerate(after.nodes):
        was = before.nodes[partner[j]] if before is not None and j in partner else None
        new.keys[id(node)] = old[id(was)] if was is not None else next(fresh)
        if was is None:
            new.added.add(id(node))
        elif node.kind != "input" and _content(was, old) != _content(node, new.keys):
            new.changed.add(id(node))
        if node.inside is not None:
            _number(was.inside if was is not None else None, node.inside, old, new, fresh)


def _content(node: Node, keys: Mapping[int, int]) -> tuple[str, str, list[tuple[int, int]]]:
    program = node.body or node.outline
    return str(node.tensors), program.key if program else "", [(keys[id(v.node)], v.index) for v in node.operands]


def _nodes_at_lines(step: ReportStep) -> set[int]:
    """Return the nodes at the lines that a step's rules were applied to, by identity."""
    lines = {line for use in step.uses for line in use.lines}
    return {id(n) for n, _ in step.graph.walk() if n.source and short(n.source) in lines}


def _difference(before: PCG, after: PCG, changed: int) -> str:
    """Return how many operators of each kind were added and removed: `+ 3 reduce, + combine, − 2 dot_general`."""
    kinds = [Counter(n.kind for n, _ in g.walk() if n.kind != "input") for g in (before, after)]
    added, removed = kinds[1] - kinds[0], kinds[0] - kinds[1]
    texts = [f"+ {n} {kind}" for kind, n in added.most_common()] + [f"− {n} {kind}" for kind, n in removed.most_common()]
    return ", ".join(texts) or f"{changed} operators make or read something else"
