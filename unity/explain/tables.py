"""A plan's decisions as tables: arguments, memory, operators, and collectives with the user's line behind each."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unity.base.formatting import duration, joined_lines, pattern, short, size
from unity.explain.brief import gap_in_words, simulated_gap_in_words, step_in_words, storage_in_words
from unity.explain.kernels import inferred_kernels
from unity.explain.offloading import offloading_in_words, state_in_words
from unity.pcg.ir.user_lines import line_behind
from unity.pcg.parallel.axis_names import AxisNames
from unity.plan.argument_kinds import argument_kinds
from unity.plan.plan import Plan
from unity.plan.undivided import Undivided, headline, undivided
from unity.plan.warnings import misaligned, undividable
from unity.search.cost.prediction import CollectiveTerm, OperatorTerm, Prediction
from unity.search.cost.profile_lookup import ROOFLINE
from unity.search.memory.backend import backend_of
from unity.search.memory.buffers_by_line import by_line
from unity.search.memory.memory import ARGUMENTS, GRADIENTS, SLOTS, MemoryPrediction
from unity.search.session import Candidate
from unity.search.substitution.trace import RuleApplication
from unity.transforms.pipelining import PipelineSource

ROWS = 25  # rows of a table that are shown; the others are counted
RECOMPUTATION = ("", ", inner values again", ", again")  # suffix of an operator's name, by `Recompute`
TYPES = (  # with the name of an axis
    "[-, {0}]: dimension 1 is sliced over {0}, dimension 0 is whole; +{0}: a partial sum over {0}; *{0}: its gradient is a partial"
    " sum (docs: types)"
)
CHANGES = (
    "combine: slices are gathered; reduce: partial sums are added up; replicate: gradients are added up; partition: slices are"
    " taken (docs: types#changes)"
)
APPLICATIONS = 100  # lines about applications of rules
WAITING = 0.01  # fraction of a simulated step: shorter waits for communication are not worth a word


def explain(plan: Plan, file: Any = None) -> None:
    """Print a plan's transformations, arguments, memory, operators and collectives."""
    console = Console(file=file, markup=False, highlight=False)
    console.width = max(console.width, 140)  # wide enough for a type and a line number side by side
    family, machine, names = plan.program.family, plan.inspect.machine, plan.program.axis_names
    prediction = plan.program.prediction
    console.print(f"{plan.__name__} on {machine.described(plan.program.computed_dtypes)}", style="bold")
    console.print(
        f"predicted: {step_in_words(plan.time, prediction)}, {size(plan.memory)} on each device;"
        f" {len(plan.program.serial)} operators, {family.searched}"
    )
    if names.parts:
        console.print(f"mesh axes: {names.parts}")
    if machine.devices > 1 and backend_of(machine).overlaps:
        words = (_simulated(plan, prediction), simulated_gap_in_words(plan))
        console.print(f"simulated: {'; '.join(filter(None, words))}")
    if gap := gap_in_words(plan):
        console.print(gap)
    undivided_rows = undivided(plan.program)
    if undivided_rows:
        console.print(headline(undivided_rows), style="yellow")
    changes = (*_constraints(plan), *_transformations(plan), *_applications(plan))
    offloaded = (f"offloaded by a checkpoint policy: {text}" for text in offloading_in_words(plan, prediction))
    for line in (*changes, *_tried(plan), *inferred_kernels(plan), *offloaded, *state_in_words(plan, prediction), *_compiled(plan)):
        console.print(line)
    if undivided_rows:
        console.print(_undivided(undivided_rows))
    console.print(_arguments(plan))
    console.print(_memory(plan.program.memory))
    console.print(_operators(prediction, names))
    console.print(_collectives(prediction, names))
    for line in blocked(plan):
        console.print(line, style="yellow")


def _constraints(plan: Plan) -> list[str]:
    """Return lines that list the constraints."""
    bound = plan.program.family.bound
    rows = [f"    {c.described(plan.program.axis_names)}" for c in dict.fromkeys((*bound.passed, *bound.marked))]
    return ["constrained by:", *rows] if rows else []


def _transformations(plan: Plan) -> list[str]:
    """Return lines about the transformations, and about why scans cannot become a pipeline."""
    lines = [line for t in plan.program.transformations for line in t.explained(plan.program.axis_names)]
    if plan.program.pipelining is not None or plan.inspect.machine.devices == 1:
        return lines
    _, refused = PipelineSource(plan.program.family.captured).stepped.scans
    return [*lines, *(f"no pipeline of {reason}" for reason in refused)]


def _applications(plan: Plan) -> list[str]:
    """Return lines about the rules that parallelized a plan, in the order of their first use, equal ones at one line merged."""
    names, counts = plan.program.axis_names, Counter[RuleApplication]()
    for a in plan.program.applications:
        over = (names.listed_of(a.axes),)
        counts[structs.replace(a, source=short(a.source), operator=pattern(a.operator), axes=over)] += 1
    rows = [f"    {times} × {application}" for application, times in counts.items()]
    more = [f"    … and {len(rows) - APPLICATIONS} more"] if len(rows) > APPLICATIONS else []
    return ["parallelized by rules, from the serial graph:", *rows[:APPLICATIONS], *more] if rows else []


def _simulated(plan: Plan, prediction: Prediction) -> str:
    """Return the time of the simulated step, and the part of it in which devices wait for communication."""
    step = plan.inspect.simulate().makespan
    waiting = 1 - prediction.computing / step if step else 0.0
    words = f"{duration(step)} a step with overlap"
    if waiting < WAITING:
        return words
    hint = " (overlap=True looks for less: docs: search#overlap)" if plan.program.family.may_overlap else ""
    return f"{words}; devices wait for {waiting:.0%} of it{hint}"


def _compiled(plan: Plan) -> list[str]:
    """Return lines about how the plan is compiled for GPUs."""
    lines = list[str]()
    if plan.program.ties_gradients and backend_of(plan.inspect.machine).overlaps:
        lines.append(
            "the gradients of a product are computed together, as the plan might not fit if one of them came late"
            " (docs: memory#late-gradients-on-gpus)"
        )
    if plan.inspect.compiler_options():
        lines.append(
            "double-buffered loops hide more of their communication: jax.jit(…, compiler_options=plan.inspect.compiler_options())"
            " (docs: search#what-xla-hides)"
        )
    return lines


def _tried(plan: Plan) -> list[str]:
    """Return lines about the plans that were run on devices, of which the first was chosen."""
    rows = [
        f"    {duration(seconds)} a step ({duration(t.predicted)} predicted, {duration(t.simulated)} simulated), {size(t.memory)}"
        for t in plan.inspect.tried
        if (seconds := t.measured) is not None
    ]
    first = f"of {len(plan.inspect.tried)} plans that were simulated, {len(rows)} were run, and the first was taken:"
    return [first, *rows] if rows else []


def _filled(table: Table, rows: Sequence[tuple[str, ...]], noun: str) -> Table:
    """Add the first rows to a table, and a row that counts the others. `noun` names what a row is about, in the plural."""
    for row in rows[:ROWS]:
        table.add_row(*map(Text, row))  # no markup: types contain brackets
    if len(rows) > ROWS:
        table.add_row(f"… and {len(rows) - ROWS} more {noun}", *("" for _ in table.columns[1:]))
    return table


def _grouped(rows: Iterable[tuple[Any, float]]) -> list[tuple[Any, int, float]]:
    """Merge pairs (key, amount) with equal keys into (key, count, sum of amounts), the largest sum first."""
    amounts: dict[Any, list[float]] = {}
    for key, amount in rows:
        amounts.setdefault(key, []).append(amount)
    return sorted(((k, len(v), sum(v)) for k, v in amounts.items()), key=lambda row: -row[2])


def _arguments(plan: Plan) -> Table:
    columns = ("arguments", "tensors", "shape", "stored", "bytes on a device")
    table = Table(*columns, title="where arguments are stored", title_justify="left")
    kinds = argument_kinds(plan.program.pcg)
    times = Counter(kind.name for kind in kinds)
    cells = []
    for kind in kinds:
        tensor, stored = str(kind.node.tensors[0]), storage_in_words(kind.node.types[0], plan.program.axis_names)
        shown = kind.name if times[kind.name] == 1 else joined_lines(kind.paths)
        cells.append((shown, str(kind.count), tensor, stored, size(kind.here)))
    return _filled(table, cells, "kinds of arguments")


def _memory(prediction: MemoryPrediction) -> Table:
    table = Table("live buffers", "producer", "bytes on a device", "line", title="memory at its peak", title_justify="left")
    always = (ARGUMENTS, GRADIENTS, SLOTS)
    for why in always:
        table.add_row(why, "", size(prediction.by_reason.get(why, 0.0)), "")
    others = by_line(h for h in prediction.held if h.why not in always)
    return _filled(table, [(row.why, row.operator, size(row.nbytes), row.line) for row in others], "kinds of buffers")


def _operators(prediction: Prediction, names: AxisNames) -> Table:
    """Return the table of operators.

    If any operator was measured, every time is followed by its origin (`unity.search.cost.profile_lookup`).
    """
    table = Table("operator", "×", "result on each device", "forward + backward", "line", title="operators", title_justify="left")
    axis = names.shown[-1].name if names.shown else "device"
    table.caption, table.caption_justify = TYPES.format(axis), "left"
    has_origins = any(t.how != ROOFLINE for t in prediction.operators)

    def key(t: OperatorTerm) -> tuple[str, str, str, str]:
        v, kind = t.node.results[0], t.node.kind + RECOMPUTATION[t.node.again]
        return kind, f"{v.tensor} {names.show(v.type, v.tensor.ndim)}", short(t.node.source), f" {t.how}" if has_origins else ""

    rows = _grouped((key(t), t.forward + t.backward) for t in prediction.operators)
    return _filled(table, [(k[0], str(n), k[1], duration(s) + k[3], k[2]) for k, n, s in rows], "kinds of operators")


def _undivided(rows: Sequence[Undivided]) -> Table:
    columns = ("operator", "×", "of the computing", "forward + backward", "why", "line")
    table = Table(*columns, title="operators that every device runs whole", title_justify="left")
    cells = [(r.kind, str(r.count), f"{r.part:.1%}", duration(r.seconds), r.reason, r.line) for r in rows]
    return _filled(table, cells, "kinds of operators")


def _collectives(prediction: Prediction, names: AxisNames) -> Table:
    table = Table("collective", "×", "over", "bytes", "time", "why", "line", title="collectives", title_justify="left")

    def key(t: CollectiveTerm) -> tuple[str, str, str, str, str]:
        c = t.collective
        over = names.in_words(c.axes)
        return c.kind, over, size(c.nbytes), f"{c.direction} of {c.node.kind}", line_behind(c.node)

    rows = _grouped((key(t), t.seconds) for t in prediction.collectives)
    table.caption, table.caption_justify = CHANGES if rows else "none: no device needs data of another", "left"
    return _filled(table, [(k[0], str(n), k[1], k[2], duration(s), k[3], k[4]) for k, n, s in rows], "kinds of collectives")


def blocked(plan: Plan) -> list[str]:
    """Return lines about what cannot be divided, with reasons, and about products that their sizes make slow."""
    return [*map(str, undividable(plan.program)), *map(str, misaligned(plan.program))]


def frontier_table(candidates: Sequence[Candidate], chosen: Candidate, exact: bool) -> Table:
    """Return the frontier as a table, one row a point, with an arrow at the chosen one."""
    extent = "every point that no other beats" if exact else "the convex hull, and points found between"
    title = f"time and memory on each device: {extent}"
    table = Table("", "point", "time", "memory", title=title, title_justify="left", min_width=80)
    for k, c in enumerate(candidates):
        is_chosen = (c.time, c.memory) == (chosen.time, chosen.memory)
        table.add_row("→" if is_chosen else "", str(k), duration(c.time), size(c.memory))
    return table


def rendered(table: Table) -> str:
    """Return a table as plain text."""
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def frontier_plot(candidates: Sequence[Candidate], chosen: Candidate, machine: str, path: str | Path | None) -> Any:
    """Return the frontier as a matplotlib figure, milliseconds over gigabytes, and write it to `path` if that is not None."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    memory, times = [c.memory / 1e9 for c in candidates], [c.time * 1e3 for c in candidates]
    axes.step(memory, times, where="post", marker="o", label="frontier")
    axes.plot(chosen.memory / 1e9, chosen.time * 1e3, "*", markersize=14, label="this plan")
    axes.set(xlabel="memory on each device (GB)", ylabel="predicted time of a step (ms)", title=machine)
    axes.legend()
    if path is not None:
        figure.savefig(path)
    return figure
