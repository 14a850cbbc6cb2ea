"""Timeline of the memory that one device holds while a step runs: bytes at each operator's turn, and the buffers at the peak.

The timeline is the sweep of the search's own memory model (`unity.search.memory.sweep`), turn by turn: the forward pass in the
order of the operators, then the backward pass in reverse. Nothing is traced or compiled, and no device is needed.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from unity.pcg.ir.graph import PCG
from unity.pcg.ir.user_lines import line_behind
from unity.search.cost.cost import Training
from unity.search.memory.backend import Backend
from unity.search.memory.buffers_by_line import LiveBuffer, merge_rows
from unity.search.memory.memory import live_ranges
from unity.search.memory.region import BACKWARD, FORWARD, Region, Turn
from unity.search.space.live_buffers import ARGUMENTS, FLIGHT, GRADIENTS, OFFLOADED, RESULTS, SLOTS, UPDATED, Buffer

WHOLE_STEP = (ARGUMENTS, FLIGHT, GRADIENTS, RESULTS, SLOTS)  # live throughout: one row each, whatever the operator
POINTER = 8  # bytes of an entry of the table of results, which a CPU program has if it has several results
UPDATE: Turn = (UPDATED, 0)  # the turn after all operators'
ROWS = 20  # of the printed table, before the rest is summed up


@dataclass(frozen=True, eq=False)
class MemoryTimeline:
    """The memory of one step on one device.

    Attributes:
        held: the buffers that are live at the peak, largest first. Operator and line are empty for those of the whole step.
        nbytes: bytes at every operator's turn, forward and then backward, without the optimizer's slots. If some of these are in
            the memory of the host, the last entry is the update, with those of one weight.
        moment: the index into `nbytes` of the peak.
        arguments: bytes of the arguments, as `compiled.memory_analysis()` counts them.
        outputs: bytes of the gradients and results, which have memory of their own for the whole step.
        temporaries: bytes of everything else at the peak.
        slots: bytes of the optimizer's slots.
        offloaded: values in the memory of the host, which take none of the device's until the backward pass reads them.
    """

    held: tuple[LiveBuffer, ...]
    nbytes: np.ndarray
    moment: int
    arguments: int
    outputs: int
    temporaries: int
    slots: int
    offloaded: tuple[LiveBuffer, ...] = ()

    @property
    def step(self) -> int:
        """Bytes at the peak without the optimizer's slots that stay on the device.

        A compiled gradient step takes as many, unless the peak is the update.
        """
        return self.arguments + self.outputs + self.temporaries

    @property
    def peak(self) -> int:
        """Bytes that the device needs in training, the optimizer's slots included."""
        return self.step + self.slots

    @cached_property
    def by_reason(self) -> Mapping[str, float]:
        """The bytes at the peak, summed up by reason."""
        sums: dict[str, float] = {}
        for buffer in self.held:
            sums[buffer.why] = sums.get(buffer.why, 0) + buffer.nbytes
        return sums

    def __str__(self) -> str:
        from rich.console import Console  # imported only when something is shown
        from rich.table import Table

        title = f"{self.peak:,} bytes at the peak (moment {self.moment} of {len(self.nbytes)})"
        table = Table("why", "operator", "line", "bytes", title=title)
        rows = merge_rows(self.held)
        for row in rows[:ROWS]:
            table.add_row(row.why, row.operator, row.line, f"{row.nbytes:,.0f}")
        if len(rows) > ROWS:
            table.add_row("", f"{len(rows) - ROWS} more", "", f"{sum(row.nbytes for row in rows[ROWS:]):,.0f}")
        if self.offloaded:
            table.caption = f"{sum(buffer.nbytes for buffer in self.offloaded):,} bytes more {OFFLOADED}"
        table.columns[3].justify = "right"
        console = Console(file=io.StringIO(), width=140, markup=False, highlight=False)
        console.print(table)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    __repr__ = __str__

    def plot(self, path: str | Path | None = None) -> Any:
        """Return the bytes over the step as a matplotlib figure (the extra `plot`), and write it to `path` if one is given."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4))
        axes = figure.subplots()
        axes.fill_between(range(len(self.nbytes)), self.nbytes / 1e6, step="post", alpha=0.4)
        axes.axhline((self.arguments + self.outputs) / 1e6, linestyle=":", label="arguments and results")
        axes.axvline(self.moment, linestyle="--", label="peak")
        axes.set(xlabel="operators, forward and backward", ylabel="MB on each device", ylim=(0, None))
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure


def memory_timeline(graph: PCG, differentiated: Collection[int], training: Training, backend: Backend) -> MemoryTimeline:
    """Return the memory of one step of a parallel graph over time. Arguments are as for `predict_memory`."""
    live = live_ranges(graph, differentiated, training, backend)
    gradients = sum(h.why == GRADIENTS for h in live.throughout)
    table = _pointer_table(gradients + len(graph.outputs)) if backend.eager else 0
    rows = [*_summed_up(live.throughout, table), *(_row(h) for h in live.peak)]
    throughout = {row.why: round(row.nbytes) for row in rows[: len(WHOLE_STEP)]}
    arguments = throughout[ARGUMENTS] + throughout[FLIGHT]
    outputs = throughout[GRADIENTS] + throughout[RESULTS]
    beside = [h for h in live.throughout if h.why not in WHOLE_STEP]
    rows += [_row(h) for h in beside]
    temporaries = sum(round(row.nbytes) for row in rows[len(WHOLE_STEP) :])
    turns, at = dict(_bytes_by_turn(live.region)), live.region.peak_turn
    if live.update:
        turns[UPDATE] = sum(h.nbytes for h in live.update)
        at = UPDATE if live.peak == live.update else at
    return MemoryTimeline(
        held=tuple(sorted((row for row in rows if row.nbytes), key=lambda row: -row.nbytes)),
        nbytes=arguments + outputs + sum(h.nbytes for h in beside) + np.array(list(turns.values())),
        moment=list(turns).index(at),
        arguments=arguments,
        outputs=outputs,
        temporaries=temporaries,
        slots=throughout[SLOTS],
        offloaded=tuple(_row(h) for h in live.offloaded),
    )


def _pointer_table(results: int) -> int:
    """Return the bytes of a CPU program's table of results; 0 if it has only one result."""
    return POINTER * results if results > 1 else 0


def _summed_up(throughout: Iterable[Buffer], table: int) -> Iterator[LiveBuffer]:
    """Yield one row for each reason in `WHOLE_STEP`; the table of results counts as a result."""
    sums = dict.fromkeys(WHOLE_STEP, 0.0)
    for h in throughout:
        if h.why in sums:
            sums[h.why] += h.nbytes
    sums[RESULTS] += table
    for why, nbytes in sums.items():
        yield LiveBuffer(why, "", "", round(nbytes))


def _row(buffer: Buffer) -> LiveBuffer:
    return LiveBuffer(buffer.why, buffer.node.kind, line_behind(buffer.node), round(buffer.nbytes))


def _bytes_by_turn(region: Region) -> Iterator[tuple[Turn, float]]:
    """Yield the bytes that are live at each turn, in order, beside what is live throughout the step."""
    forward, backward = region.forward_turns(), region.backward_turns()
    ahead = {i: nbytes - sum(n for _, n in forward.reused(i)) for i, nbytes in forward.sizes().items()}
    own = zip(backward.sizes, backward.own, strict=True)
    back = [nbytes - sum(n for _, n in backward.reused(i, working)) for i, (nbytes, working) in enumerate(own)]
    if region.residuals.training:
        yield from (((FORWARD, i), nbytes) for i, nbytes in ahead.items())
        yield from (((BACKWARD, i), nbytes) for i, nbytes in reversed([*enumerate(back)]))
        return
    for i, nbytes in enumerate([ahead[-1], *back], -1):  # two views of the only pass; at the peak, the one that has it counts
        forward_higher = region.peak_turn == (FORWARD, i) or (ahead[i] > nbytes and region.peak_turn != (BACKWARD, i))
        yield ((FORWARD, i), ahead[i]) if i < 0 or forward_higher else ((BACKWARD, i), nbytes)
