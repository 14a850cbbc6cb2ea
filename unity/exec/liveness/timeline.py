"""What a device holds while a step runs: how many bytes when, and at the peak, what holds them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

WORKED_ON, GAPS = "worked on", "between buffers"  # other reasons are those of `search.memory`
ROWS = 20  # of the table, before the rest is summed up


@dataclass(frozen=True)
class Held:
    """Bytes on one device at the peak: why, the operator that made them, and the user's line (both empty for arguments)."""

    why: str
    operator: str
    line: str
    nbytes: int


@dataclass(frozen=True, eq=False)
class MemoryTimeline:
    """The memory of one step on one device.

    held: all that is there at the peak, largest first. nbytes: bytes at every moment of the step, which is one operation
    (without the optimizer's slots). moment: the one at which most is held. arguments, outputs, temporaries: as
    `compiled.memory_analysis()` counts them: results have memory of their own for the whole step.
    """

    held: tuple[Held, ...]
    nbytes: np.ndarray
    moment: int
    arguments: int
    outputs: int
    temporaries: int
    slots: int

    @property
    def step(self) -> int:
        """Bytes of one gradient step, as the compiled program has it: it knows no optimizer."""
        return self.arguments + self.outputs + self.temporaries

    @property
    def peak(self) -> int:
        """Bytes that the device must have in training: also the optimizer's."""
        return self.step + self.slots

    @cached_property
    def by_reason(self) -> Mapping[str, int]:
        """The bytes at the peak by why they are held."""
        found: dict[str, int] = {}
        for h in self.held:
            found[h.why] = found.get(h.why, 0) + h.nbytes
        return found

    def __str__(self) -> str:
        from rich.console import Console  # imported only when something is shown
        from rich.table import Table

        title = f"{self.peak:,} bytes at the peak (moment {self.moment} of {len(self.nbytes)})"
        table = Table("why", "operator", "line", "bytes", title=title)
        joined: dict[tuple[str, str, str], int] = {}
        for h in self.held:
            joined[h.why, h.operator, h.line] = joined.get((h.why, h.operator, h.line), 0) + h.nbytes
        rows = sorted(joined.items(), key=lambda row: -row[1])
        for (why, operator, line), nbytes in rows[:ROWS]:
            table.add_row(why, operator, line, f"{nbytes:,}")
        if len(rows) > ROWS:
            table.add_row("", f"{len(rows) - ROWS} more", "", f"{sum(n for _, n in rows[ROWS:]):,}")
        table.columns[3].justify = "right"
        console = Console(file=io.StringIO(), width=140, markup=False, highlight=False)
        console.print(table)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    __repr__ = __str__

    def plot(self, path: str | Path | None = None) -> Any:
        """The bytes over the step as a matplotlib figure (the extra `plot`), written to `path` if one is given."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4))
        axes = figure.subplots()
        axes.fill_between(range(len(self.nbytes)), self.nbytes / 1e6, step="post", alpha=0.4)
        axes.axhline((self.arguments + self.outputs) / 1e6, linestyle=":", label="arguments and results")
        axes.axvline(self.moment, linestyle="--", label="peak")
        axes.set(xlabel="operations", ylabel="MB on each device", ylim=(0, None))
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure
