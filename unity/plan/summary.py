"""Summaries of plans as plain data: the graph, the rules behind it, and the costs by line of the user's program.

A plan file contains two summaries, of the captured program on one device and of the plan, so that plans can be shown and compared
without the function that they were made for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from dataclasses import replace as with_fields
from functools import cached_property
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict, replace

from unity.base.documents import Natural, Record, at, plain
from unity.base.formatting import pattern, short
from unity.machine.machine import Machine
from unity.pcg.ir.compact_json import FoldedDocument, folded, unfolded
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node
from unity.pcg.ir.graph_json import to_json as graph_json
from unity.pcg.ir.user_lines import line_behind, source_of_use
from unity.pcg.parallel.axis_names import AxisNames, names_in
from unity.pcg.parallel.parallelize import on_one_device
from unity.plan.planned_program import PlannedProgram
from unity.plan.warnings import PlanWarning, warnings_of
from unity.search.cost.prediction import Prediction, predict
from unity.search.memory.backend import backend_of
from unity.search.memory.buffers_by_line import by_line
from unity.search.memory.memory import MemoryPrediction, predict_memory
from unity.search.space.live_buffers import whole
from unity.substitutions.language.axioms import default_library
from unity.transforms.transformation import RewrittenLines

SCHEMA = 1
HOST_TRANSFER = "host-transfer"


class Work(Record):
    """The count of the operators of one kind at one line of the user's, and the seconds of all their runs on one device."""

    line: str
    kind: str
    count: int
    seconds: float


class Talk(Record):
    """Equal collectives: their axes and purpose, their count, the bytes of one's larger side, and the seconds of all of them.

    Transfers of offloaded values to the host and back are listed among them, over no axis (`HOST_TRANSFER`).

    Attributes:
        line: the user's line behind the value that they move, or the argument.
        use: the user's line that needs them.
        value: the argument, or the operator's result, that they move.
    """

    line: str
    kind: str
    over: str
    why: str
    count: int
    nbytes: int
    seconds: float
    use: str = ""
    value: str = ""


class LiveBytes(Record):
    """Bytes on one device that are live at the peak: the user's line and the kind of the producer, and why they are live."""

    line: str
    kind: str
    why: str
    nbytes: float


class RuleUse(Record):
    """Equal applications of a rule: its name and statement, their count, and the user's lines and mesh axes of them."""

    rule: str
    says: str
    times: int
    lines: tuple[str, ...]
    over: tuple[str, ...] = ()


class SummaryRecord(Record, tag_field="unity", tag="summary"):
    """A `Summary` in a document."""

    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)]
    name: str
    machine: str
    devices: Natural
    time: float
    memory: float
    work: tuple[Work, ...]
    talk: tuple[Talk, ...]
    rules: tuple[RuleUse, ...]
    applications: tuple[RuleUse, ...]
    live: tuple[LiveBytes, ...]
    warnings: tuple[PlanWarning, ...]
    graph: FoldedDocument


@dataclass(frozen=True, eq=False)
class Summary:
    """A program as it runs on a machine.

    `rules` lists the rewriting's rules, in order. `applications` lists the other transformations (recomputed layers, pipelines,
    branches, joined weights), and the rules that parallelized the program if a search by substitution did.

    The types of its graph, and the names in `talk` and `applications`, are over the axes of the search: `in_user_names` has those
    that users see. `levels` has the names of the machine's levels, outermost first; it is empty if the machine has a mesh of the
    user's, or is not known.
    """

    name: str  # of the function
    machine: str
    devices: int
    time: float  # seconds of a step, predicted
    memory: float  # bytes on one device, predicted
    graph: PCG
    work: tuple[Work, ...]
    talk: tuple[Talk, ...]
    rules: tuple[RuleUse, ...] = ()
    applications: tuple[RuleUse, ...] = ()
    live: tuple[LiveBytes, ...] = ()
    warnings: tuple[PlanWarning, ...] = ()
    levels: tuple[str, ...] = ()

    @cached_property
    def names(self) -> AxisNames:
        """The names of the mesh axes that users see."""
        over = [*(tuple(t.over.split("·")) for t in self.talk), *(use.over for use in self.applications)]
        number = {axis.name: k for k, axis in enumerate(self.graph.axes)}
        return names_in(self.graph, self.levels, [[number[name] for name in names if name in number] for names in over])

    def in_user_names(self, names: AxisNames | None = None) -> Summary:
        """Return the summary with the names of mesh axes that users see: by default its own, or those that `names` has."""
        names = names or self.names
        if not names.levels:
            return self
        return with_fields(
            self,
            graph=names.graph(self.graph),
            talk=tuple(replace(t, over=names.listed_of(t.over.split("·"))) for t in self.talk),
            applications=tuple(_along(u, names.listed_of(u.over)) if u.over else u for u in self.applications),
            levels=(),
        )

    def to_json(self) -> dict[str, Any]:
        """Return data for other tools: the graph with every type, arguments by name, costs in seconds and bytes.

        The graph and the costs are over the axes of the search; `mesh_axes` lists those that each axis stands for that users see.
        """
        axes, names = self.graph.axes, self.names
        mesh_axes = {a.name: [axes[k].name for k in group] for a, group in zip(names.shown, names.groups, strict=True)}
        fields = plain({**self._fields, "graph": None})
        return {"unity": "summary", "schema": SCHEMA, **fields, "mesh_axes": mesh_axes, "graph": graph_json(self.graph)}

    @property
    def record(self) -> SummaryRecord:
        """The summary for a plan file."""
        return SummaryRecord(**{**self._fields, "schema": SCHEMA, "graph": folded(self.graph)})

    @property
    def _fields(self) -> dict[str, Any]:
        """The fields of a document."""
        return {field: getattr(self, field) for field in SummaryRecord.__struct_fields__ if field != "schema"}


def read_summary(record: SummaryRecord, machine: Machine) -> Summary:
    """Return the summary of a record, for the machine of its document. Raises Misfit if its graph is damaged."""
    with at(".graph"):
        fields = {**asdict(record), "graph": unfolded(record.graph), "levels": machine.named_levels}
    fields["rules"] = tuple(map(_presently_named, record.rules))
    return Summary(**{name: value for name, value in fields.items() if name != "schema"})


def summary_of(program: PlannedProgram) -> Summary:
    """Return the summary of a plan's program."""
    graph, family, machine = program.pcg, program.family, program.family.search.machine
    prediction = program.prediction
    figures = family.name, machine.name, machine.devices, program.candidate.time, program.candidate.memory
    rules = _merged(rule_use(use) for t in program.transformations for use in t.uses)
    applied = (*_transformations(program), *_applications(program))
    warnings = warnings_of(program)
    return Summary(
        *figures, graph, *_costs(prediction, graph), rules, applied, _live(program.memory), warnings, machine.named_levels
    )


def captured_summary_of(program: PlannedProgram) -> Summary:
    """Return the summary of the captured program that a plan was made for, on one device of the plan's machine."""
    family, machine = program.family, program.family.search.machine.alone
    graph = on_one_device(program.original)
    prediction = predict(graph, machine, family.differentiated, family.search.training.state)
    memory = predict_memory(graph, family.differentiated, family.search.training, backend_of(machine))
    figures = family.name, machine.name, 1, prediction.time, memory.total
    return Summary(*figures, program.original, *_costs(prediction, graph), live=_live(memory))


def step_seconds(summary: Summary) -> tuple[float, float]:
    """Return the seconds that a step computes, and the seconds that it communicates."""
    return sum(w.seconds for w in summary.work), sum(t.seconds for t in summary.talk)


def seconds_by_line(rows: Iterable[Work | Talk]) -> dict[str, float]:
    """Return the seconds of each source line."""
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row.line] = seconds.get(row.line, 0.0) + row.seconds
    return seconds


def _costs(prediction: Prediction, graph: PCG) -> tuple[tuple[Work, ...], tuple[Talk, ...]]:
    """Return the operators and the collectives of a prediction, equal ones merged, in the order of their first occurrence."""
    work: dict[tuple[str, str], Work] = {}
    for t in prediction.operators:
        key = short(t.node.source), t.node.kind
        old = work.get(key, Work(*key, 0, 0.0))
        work[key] = Work(*key, old.count + t.count, old.seconds + t.forward + t.backward)
    talk: dict[tuple[Any, ...], Talk] = {}
    uses = {id(node): short(source_of_use(node, inner)) for inner in graph.graphs() for node in inner.nodes}
    for t in prediction.collectives:
        c = t.collective
        over = "·".join(graph.axes[i].name for i in c.axes)
        use = uses.get(id(c.node), short(c.node.source))
        key = line_behind(c.node), c.kind, over, f"{c.direction} of {c.node.kind}", c.nbytes, use, _value(c.node)
        old = talk.get(key, Talk(*key[:4], 0, c.nbytes, 0.0, *key[5:]))
        talk[key] = replace(old, count=old.count + c.count, seconds=old.seconds + t.seconds)
    for t in prediction.transfers:
        purpose, nbytes = "optimizer's state" if t.of_state else f"offload of {t.node.kind}", round(t.nbytes)
        value = pattern(t.node.name) if t.of_state else t.node.kind
        key = line_behind(t.node), HOST_TRANSFER, "", purpose, nbytes, uses.get(id(t.node), short(t.node.source)), value
        old = talk.get(key, Talk(*key[:4], 0, nbytes, 0.0, *key[5:]))
        talk[key] = replace(old, count=old.count + 2 * t.count, seconds=old.seconds + t.seconds)
    return tuple(work.values()), tuple(talk.values())


def _value(node: Node) -> str:
    """Return the name of the value that a change of type or an operator communicates."""
    if node.kind not in PARALLELIZATION:
        return node.kind
    origin = whole(node.operands[0]).node
    name = pattern(origin.name)
    if origin.kind != "input" or not name:
        return f"the result of {origin.kind}"
    return f"every {name}" if name.startswith("step of ") else name


def _live(memory: MemoryPrediction) -> tuple[LiveBytes, ...]:
    """Return the live buffers of a prediction, those of one line, producer and reason merged, the largest first."""
    return tuple(LiveBytes(row.line, row.operator, row.why, row.nbytes) for row in by_line(memory.held))


def _along(use: RuleUse, axes: str) -> RuleUse:
    """Return a use with other names of its axes. Files of earlier releases have them in its statement, too."""
    return replace(use, over=(axes,), says=use.says.replace(f"along {' '.join(use.over)}", f"along {axes}"))


def _presently_named(use: RuleUse) -> RuleUse:
    """Return a use of a rule with its present name. Files of earlier releases have the names that the generator made."""
    name, space, direction = use.rule.partition(" ")
    return replace(use, rule=f"{default_library().present_name(name)}{space}{direction}") if ".is." in name else use


def rule_use(use: RewrittenLines) -> RuleUse:
    """Return a use of a rule by a transformation, with its lines in short."""
    return RuleUse(use.rule, use.statement, use.times, tuple(dict.fromkeys(map(short, use.lines))))


def _transformations(program: PlannedProgram) -> Iterator[RuleUse]:
    """Yield the transformations but those by rules, at the lines of the operators that they lead to."""
    for t in program.transformations:
        if not t.by_rules:
            lines = tuple(short(node.source) for node in program.serial.nodes if node.kind == t.kind)
            yield RuleUse(t.kind, str(t), 1, lines, tuple(axis.name for axis in t.along))


def _applications(program: PlannedProgram) -> tuple[RuleUse, ...]:
    lines = ((short(a.source),) if a.source else () for a in program.applications)
    uses = zip(program.applications, lines, strict=True)
    return _merged(RuleUse(pattern(a.operator), a.rule, 1, where, a.axes) for a, where in uses)


def _merged(uses: Iterable[RuleUse]) -> tuple[RuleUse, ...]:
    """Merge uses that differ in their counts alone, each at the place of its first occurrence."""
    counts: dict[RuleUse, int] = {}
    for use in uses:
        key = replace(use, times=0)
        counts[key] = counts.get(key, 0) + use.times
    return tuple(replace(use, times=times) for use, times in counts.items())
