"""The search against an integer program over the same tables, solved by HiGHS: an optimum that shares no code with it.

`python -m benchmarks.ilp`. One binary variable for each value of each variable of the problem, one variable for each pair of values
of an edge (pairs whose costs are equal throughout count as one), tied together so that pairs agree with values; it is an integer
where an edge has alternatives, of which a limit on memory would else take a mixture. Without a limit on memory the search must find
the optimum; with one, it looks on the hull of the frontier and between its points, and the table says what that loses. Memory is
what the tables add up; what a second search with other values finds (`unity.search.cost.refinement`) is not part of the comparison.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from benchmarks.models import get
from benchmarks.models.model import Model
from benchmarks.record import asked, record, show
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.search.solver.frontier import frontier_under
from unity.search.solver.problem import Array, Problem

SECONDS = 240  # for one integer program
GAP = 1e-7  # at which HiGHS may stop
TIGHT = (0.25, 0.5, 0.75, 0.9)  # limits on memory, between the leanest plan (0) and the fastest (1)


def cases() -> dict[str, tuple[Model, Machine]]:
    small = Machine.grid(1, 4, "v100")
    eight, two_nodes = Machine.grid(1, 8, "a100"), Machine.grid(2, 2, "v100")
    return {
        "mlp 4 layers, 8": (get("mlp", layers=4), eight),
        "mlp 16 layers, 8": (get("mlp"), eight),
        "lenet5, 4": (get("lenet5"), small),
        "lenet5, 8": (get("lenet5"), eight),
        "alexnet, 8": (get("alexnet"), eight),
        "vgg16, 4": (get("vgg16"), small),
        "vgg16, 8": (get("vgg16"), eight),
        "vgg16, 2x2": (get("vgg16"), two_nodes),
        "dlrm, 8": (get("dlrm"), eight),
        "dlrm, 2x2": (get("dlrm"), two_nodes),
        "rnnlm, 8": (get("rnnlm"), eight),
        "gpt 1 layer, 4": (get("gpt2_padded", layers=1, batch=32), small),
        "gpt 1 layer, 8": (get("gpt2_padded", layers=1, batch=32), eight),
        "gpt 1 layer, 2x2": (get("gpt2_padded", layers=1, batch=32), two_nodes),
        "gpt 2 layers, 8": (get("gpt2_padded", layers=2, batch=32), eight),
        "inception_v3, 4": (get("inception_v3"), small),
    }


@dataclass(frozen=True)
class Optimum:
    """What the integer program found: the best it knows, and a proved bound on all."""

    best: float | None
    bound: float
    seconds: float
    status: str
    columns: int


class Program:
    """The integer program of a problem, to be solved for any limit on memory."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.rows: list[Array] = []
        self.columns: list[Array] = []
        self.entries: list[Array] = []
        self.sides: list[float] = []
        self.time: list[Array] = []
        self.memory: list[Array] = []
        self.integer: list[Array] = []
        self.count = 0
        self.unary = [self.alone(cost.time, cost.memory) for cost in problem.unary]
        for edge in problem.edges:
            self.pair(self.unary[edge.first], self.unary[edge.second], edge.cost.time, edge.cost.memory)

    def new(self, time_: Array, memory: Array, integer: bool) -> Array:
        """Columns with these costs; what a cost forbids is bounded by zero when the program is solved."""
        self.time.append(time_)
        self.memory.append(np.where(np.isfinite(time_), memory, 0.0))
        self.integer.append(np.full(len(time_), integer))
        self.count += len(time_)
        return np.arange(self.count - len(time_), self.count)

    def equation(self, columns: Array, entries: Array, side: float) -> None:
        self.rows.append(np.full(len(columns), len(self.sides)))
        self.columns.append(columns)
        self.entries.append(entries)
        self.sides.append(side)

    def alone(self, time_: Array, memory: Array) -> Array:
        """A variable: columns [alternatives, values], exactly one of which is 1."""
        made = self.new(time_.ravel(), memory.ravel(), True)
        self.equation(made, np.ones(len(made)), 1.0)
        return made.reshape(time_.shape)

    def pair(self, first: Array, second: Array, time_: Array, memory: Array) -> None:
        """An edge: columns [alternatives, classes, classes] whose sums over either side are the other's values."""
        table = np.stack([time_, memory], axis=-1)
        rows, row_of = np.unique(np.moveaxis(table, 1, 0).reshape(table.shape[1], -1), axis=0, return_inverse=True)
        columns, column_of = np.unique(np.moveaxis(table, 2, 0).reshape(table.shape[2], -1), axis=0, return_inverse=True)
        row_at = np.array([np.flatnonzero(row_of.ravel() == i)[0] for i in range(len(rows))])
        column_at = np.array([np.flatnonzero(column_of.ravel() == j)[0] for j in range(len(columns))])
        index = np.ix_(range(len(table)), row_at, column_at)  # pyright: ignore[reportArgumentType, reportCallIssue]
        made = self.new(time_[index].ravel(), memory[index].ravel(), len(table) > 1).reshape(len(table), len(rows), len(columns))
        for i in range(len(rows)):
            self.agree(made[:, i].ravel(), first[:, row_of.ravel() == i].ravel())
        for j in range(len(columns)):
            self.agree(made[:, :, j].ravel(), second[:, column_of.ravel() == j].ravel())

    def agree(self, pairs: Array, values: Array) -> None:
        self.equation(np.concatenate([pairs, values]), np.concatenate([np.ones(len(pairs)), -np.ones(len(values))]), 0.0)

    def solve(self, limit: float | None = None) -> Optimum:
        """The least time, with at most so much memory if there is a limit. HiGHS sees numbers of about one."""
        times = np.concatenate(self.time)
        allowed = np.isfinite(times)
        unit = max(cost.time[np.isfinite(cost.time)].max(initial=0) for _, cost in self.problem.tables) / 100
        matrix = coo_array(
            (np.concatenate(self.entries), (np.concatenate(self.rows), np.concatenate(self.columns))),
            shape=(len(self.sides), self.count),
        ).tocsr()
        constraints = [LinearConstraint(matrix, self.sides, self.sides)]  # pyright: ignore[reportArgumentType, reportCallIssue]
        if limit is not None:
            constraints.append(LinearConstraint(np.concatenate(self.memory)[None] / limit, -np.inf, 1.0))
        started = time.perf_counter()
        found = milp(
            np.where(allowed, times, 0.0) / unit,
            integrality=np.concatenate(self.integer).astype(int),
            bounds=Bounds(0.0, allowed.astype(float)),  # pyright: ignore[reportArgumentType, reportCallIssue]
            constraints=constraints,
            options={"time_limit": SECONDS, "mip_rel_gap": GAP},
        )
        bound = -np.inf if found.mip_dual_bound is None else float(found.mip_dual_bound) * unit
        best = None if found.x is None else float(found.fun) * unit
        return Optimum(best, bound, time.perf_counter() - started, ("optimal" if found.status == 0 else "stopped"), self.count)


def compare(name: str, model: Model, machine: Machine) -> list[dict[str, Any]]:
    captured = capture(model.loss, model.params, model.batch)
    search = Search(captured.graph, captured.differentiated, machine, Training())
    problem, minimizer = search.assembled.problem, search.minimizer
    program = Program(problem)
    fast, lean = minimizer.at([0.0, math.inf])
    rows = []
    for part in (None, *TIGHT):
        limit = None if part is None else lean.memory + part * (fast.memory - lean.memory)
        clock = time.perf_counter()
        found = fast if limit is None else frontier_under(problem, limit, minimizer)
        seconds = time.perf_counter() - clock
        best = program.solve(limit)
        assert found is not None
        rows.append(
            {
                "case": name,
                "limit": "none" if part is None else f"{part:.0%}",
                "search_ms": found.time * 1e3,
                "search_seconds": seconds,
                "ilp_ms": None if best.best is None else best.best * 1e3,
                "ilp_bound_ms": best.bound * 1e3,
                "ilp_seconds": best.seconds,
                "ilp_status": best.status,
                "columns": best.columns,
                "loss": None if best.best is None else found.time / best.best - 1,
            }
        )
    return rows


def main() -> None:
    known = cases()
    names, whole = asked(__doc__, known)
    rows = []
    for name in names:
        rows += compare(name, *known[name])
        show(name, [r for r in rows if r["case"] == name])
    exact = [r["loss"] for r in rows if r["limit"] == "none" and r["ilp_status"] == "optimal"]
    limited = [r["loss"] for r in rows if r["limit"] != "none" and r["ilp_status"] == "optimal"]
    print(f"fastest: {len(exact)} compared, largest difference {max(map(abs, exact), default=0):.2g}")
    mean, most = np.mean(limited or [0]), max(limited, default=0)
    print(f"under a limit: {len(limited)} compared, mean loss {mean:.2%}, largest {most:.2%}")
    if whole:
        record("ilp", rows, gap=GAP, seconds=SECONDS)


if __name__ == "__main__":
    main()
