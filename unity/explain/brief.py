"""A summary of a plan in a few lines: its figures, the storage of weights and inputs, its collectives and transformations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, isinf

from unity.base.formatting import duration, pattern, size
from unity.explain.offloading import offloading_in_words, state_in_words
from unity.pcg.ir.graph import Node
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.types.parallel_type import Type
from unity.plan.plan import Plan
from unity.plan.undivided import headline, undivided
from unity.search.cost.prediction import Prediction

ROUNDING = 1e-6  # the largest gap that the order of sums and the margins of a bound explain
TELLING = 1.0  # gaps of simulated steps that are larger say little
SHARED = 1e-3  # the largest part of a step that is counted twice without a word
ROWS = 3  # rows of each subject that are shown; the others are counted


def brief(plan: Plan) -> str:
    """Return a plan's decisions in about six lines."""
    prediction = plan.program.prediction
    devices = plan.inspect.machine.devices
    on = f"each of {devices} devices" if devices > 1 else "the device"
    lines = [
        f"{plan.__name__} on {plan.inspect.machine.name}, predicted: {step_in_words(plan.time, prediction)},"
        f" {size(plan.memory)} on {on}"
    ]
    if overlap := overlap_in_words(plan):
        lines += _rows("simulated", [overlap])
    if "bound" in vars(plan.inspect) and plan.inspect.bound is not None:
        lines += _rows("bound", [gap_in_words(plan)])
    inputs, names = plan.program.pcg.inputs, plan.program.axis_names
    weights = plan.program.family.captured.differentiated
    lines += _rows("weights", _arguments([n for k, n in enumerate(inputs) if k in weights], names))
    lines += _rows("inputs", _arguments([n for k, n in enumerate(inputs) if k not in weights], names))
    lines += _rows("sent", _sent(prediction, names))
    lines += _rows("offload", [*state_in_words(plan, prediction), *offloading_in_words(plan, prediction)])
    lines += _rows("changed", [t.described(names) for t in plan.program.transformations])
    undivided_rows = undivided(plan.program)
    return "\n".join([*lines, *([headline(undivided_rows)] if undivided_rows else [])])


def step_in_words(time: float, prediction: Prediction) -> str:
    """Return the seconds of a step and their parts: `51 ms a step (31 ms computing, 20 ms communicating)`.

    Args:
        time: the seconds that the search counts. Where several operators change the type of a value alike, it counts each change.
        prediction: the terms of the parallel graph, which has each change once.
    """
    parts = [f"{duration(prediction.computing)} computing", f"{duration(prediction.communicating)} communicating"]
    if prediction.offloading:
        parts.append(f"{duration(prediction.offloading)} moving values to the host and back")
    if time > prediction.time * (1 + SHARED):
        parts.append(f"and {duration(time - prediction.time)} of communication that is shared, but counted for each operator")
    return f"{duration(time)} a step ({', '.join(parts)})"


def overlap_in_words(plan: Plan) -> str:
    """Return the time of the simulated step, in words, if the plan was chosen by it; else an empty text."""
    seconds = plan.program.candidate.simulated
    return "" if seconds is None else f"{duration(seconds)} a step, as communication overlaps with computing"


def gap_in_words(plan: Plan) -> str:
    """Return the most by which a plan is slower than the best sharding of its program within its memory limit, in words.

    The percentage is rounded up to tenths. Without a bound, the text is empty.
    """
    gap, limit = plan.inspect.gap, plan.program.family.limit
    if gap is None:
        return ""
    by = "" if plan.program.candidate.simulated is None else ", by the sum of its operators and collectives"
    best = f"sharding of this program{'' if limit is None or isinf(limit) else f' within {size(limit)}'}"
    if gap < ROUNDING:
        return f"no {best} is faster{by}"
    return f"at most {_rounded_up(gap)} from the best possible {best}{by}"


def simulated_gap_in_words(plan: Plan) -> str:
    """Return the most by which a plan's simulated step is longer than the shortest of any sharding, in words.

    The text is empty without a bound, and if that is less than half of the step, as it leaves out communication.
    """
    gap = plan.inspect.simulated_gap
    return "" if gap is None or gap > TELLING else f"at most {_rounded_up(gap)} from the shortest simulated step of any sharding"


def _rounded_up(part: float) -> str:
    """Return a part as a percentage, rounded up to tenths."""
    return f"{ceil(part * 1000) / 10:.1f} %"


def _rows(subject: str, rows: Sequence[str]) -> list[str]:
    more = [f"… and {len(rows) - ROWS} more"] if len(rows) > ROWS else []
    return [f"  {subject if k == 0 else '':8} {row}" for k, row in enumerate((*rows[:ROWS], *more))]


def _arguments(nodes: Iterable[Node], names: AxisNames) -> list[str]:
    """Return a row for every way in which arguments are stored, that of the most bytes first."""
    by_storage: dict[str, list[Node]] = {}
    for node in nodes:
        by_storage.setdefault(storage_in_words(node.types[0], names), []).append(node)
    rows = []
    for words, alike in sorted(by_storage.items(), key=lambda item: -_nbytes(item[1])):
        first, *others = dict.fromkeys(pattern(n.name) for n in sorted(alike, key=lambda n: -_nbytes([n])))
        more = f" and {len(others)} more kind{'s' if len(others) > 1 else ''}" if others else ""
        rows.append(f"{words}: {first}{more}, {size(_nbytes(alike))} in all")
    return rows


def _nbytes(nodes: Iterable[Node]) -> int:
    return sum(n.tensors[0].nbytes for n in nodes)


def storage_in_words(type_: Type, names: AxisNames) -> str:
    """Return how an argument is stored: `dimension 0 over node (4), dimension 1 over device (8)`, or `whole on every device`."""
    dims: dict[int, list[int]] = {}
    for k, state in enumerate(type_):
        if state.kind == "P":
            dims.setdefault(state.dim, []).append(k)
    if not dims:
        return "whole on every device" if names.axes else "whole"
    return ", ".join(f"dimension {d} over {names.in_words(axes)}" for d, axes in sorted(dims.items()))


def _sent(prediction: Prediction, names: AxisNames) -> list[str]:
    """Return a row for every kind of collective and the axes that it runs over, the slowest first."""
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for t in prediction.collectives:
        c = t.collective
        key = c.kind, names.in_words(c.axes)
        nbytes, seconds = sums.get(key, (0.0, 0.0))
        sums[key] = nbytes + c.count * c.nbytes, seconds + t.seconds
    rows = sorted(sums.items(), key=lambda item: -item[1][1])
    return [f"{kind} over {over}: {size(nbytes)} in {duration(seconds)}" for (kind, over), (nbytes, seconds) in rows]
