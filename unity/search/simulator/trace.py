"""Output of a timeline with memory over time: as a trace for Perfetto and Chrome (chrome://tracing), and as a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unity.base.atomic_files import save
from unity.search.simulator.memory import MemoryOverTime
from unity.search.simulator.timeline import Timeline

PROCESSES = {"compute": (1, "computing"), "link": (2, "links")}
MEMORY = (3, "memory")
MOST_ROWS = 64  # rows of a picture
HEIGHT = 2.5  # height of its memory plot in inches


def write_trace(
    path: str | os.PathLike[str], timeline: Timeline, label: Callable[[int], str], memory: Mapping[str, MemoryOverTime]
) -> None:
    """Write a timeline as trace events (JSON, microseconds). The file is replaced as a whole, or not at all.

    Raises:
        PlanError: the file cannot be written.
    """
    trace = [*events(timeline, label), *counters(memory)]
    save(path, json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}) + "\n")


def events(timeline: Timeline, label: Callable[[int], str]) -> list[dict[str, Any]]:
    """Return a complete event ("X") for every task, and the names of devices. Barriers take no time and are left out."""
    trace: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in PROCESSES.values()
    ]
    for k, (resource, names) in enumerate(zip(timeline.graph.devices, timeline.order, strict=True)):
        if resource.kind not in PROCESSES or not names:
            continue
        where = {"pid": PROCESSES[resource.kind][0], "tid": k}
        trace.append({"ph": "M", "name": "thread_name", **where, "args": {"name": resource.name}})
        for name in names:
            task, start = timeline.graph.tasks[name], timeline.start[name]
            args = {"task": name, "ready": timeline.ready[name] * 1e6} | ({"bytes": task.nbytes} if task.nbytes else {})
            trace.append({"ph": "X", "name": label(name), "ts": start * 1e6, "dur": task.seconds * 1e6, **where, "args": args})
    return trace


def counters(memory: Mapping[str, MemoryOverTime]) -> Iterator[dict[str, Any]]:
    """Yield a counter event ("C") wherever the memory of a device changes: its bytes by the reason why they are live."""
    pid, name = MEMORY
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for device, device_memory in memory.items():
        for k, time in enumerate(device_memory.times):
            args = {why: float(nbytes[k]) for why, nbytes in device_memory.by_reason.items()}
            yield {"ph": "C", "name": device, "pid": pid, "ts": float(time) * 1e6, "args": args}


def picture(timeline: Timeline, memory: MemoryOverTime, path: str | os.PathLike[str] | None = None) -> Any:
    """Draw a timeline as a matplotlib figure (the extra `plot`), and below it a device's memory.

    Each device and link that is used has a row; if there are many, only the busiest have. The figure is written to `path` if one is
    given.
    """
    from matplotlib.figure import Figure

    graph, busy = timeline.graph, timeline.busy
    used = [k for k, r in enumerate(graph.devices) if r.kind in PROCESSES and busy[k] > 0]
    rows = sorted(sorted(used, key=lambda k: -busy[k])[:MOST_ROWS])
    height = 0.5 + 0.3 * len(rows)
    figure = Figure(figsize=(10, 0.7 + height + HEIGHT), layout="constrained")
    axes, below = figure.subplots(2, sharex=True, height_ratios=(height, HEIGHT))
    for y, k in enumerate(rows):
        bars = [(timeline.start[n] * 1e3, graph.tasks[n].seconds * 1e3) for n in timeline.order[k]]
        axes.broken_barh(bars, (y - 0.4, 0.8), facecolors="tab:blue" if graph.devices[k].kind == "compute" else "tab:orange")
    axes.set_yticks(range(len(rows)), [graph.devices[k].name for k in rows])
    axes.invert_yaxis()
    axes.set(title=f"{timeline.makespan * 1e3:.4g} ms, {memory.peak / 1e6:.4g} MB at most")
    reasons = {why: nbytes / 1e6 for why, nbytes in memory.by_reason.items()}
    below.stackplot(memory.times * 1e3, *reasons.values(), labels=list(reasons), step="post")
    below.set(xlabel="ms", ylabel="MB")
    below.legend(fontsize="small", loc="upper right")
    if path is not None:
        figure.savefig(path)
    return figure
