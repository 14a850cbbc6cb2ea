"""How long it takes to compare two large graphs, and to say it: BERT-Large, of 32 layers, under two strategies.

`python -m benchmarks.diff`. The strategies are the fastest and the leanest that a first search finds; both graphs have more than
1,000 operators. Each time is the median of five; `diff_process` are seconds of this process alone, `cold` those of the first diff,
for which the graphs' hashes are computed too.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import unity
from benchmarks.models import get
from benchmarks.record import asked, record, show
from unity.diff import PlanDiff, apply, diff
from unity.diff.graph_diff_json import to_json
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.parallelize import parallelize
from unity.plan.summary import Summary
from unity.search.cost.assembly import assemble
from unity.search.cost.cost import Training
from unity.search.solver.minimizer import Minimizer

MACHINES = {"8 devices": (1, 8, "a100"), "192 devices": (32, 6, "v100")}
TARGET, TIMES = 1.0, 5


def graphs(machine: unity.Machine) -> tuple[PCG, PCG, PCG]:
    """The captured graph, and two strategies."""
    model = get("bert_large", layers=32)
    captured = capture(model.loss, model.params, model.batch)
    assembled = assemble(captured.graph, captured.differentiated, machine, Training())
    fast, lean = Minimizer(assembled.problem).at([0.0, math.inf])
    one, other = (parallelize(captured.graph, assembled.assignment(p)) for p in (fast, lean))
    return captured.graph, one, other


def seconds(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter, times: int = TIMES) -> float:
    found = []
    for _ in range(times):
        started = clock()
        run()
        found.append(clock() - started)
    return statistics.median(found)


def said(before: PCG, after: PCG, form: str) -> str:
    one, other = (Summary(name, "", 0, 0.0, 0.0, graph, (), ()) for name, graph in (("before", before), ("after", after)))
    return PlanDiff(one, other).formatted(form)


def row_of(machine: str, case: str, before: PCG, after: PCG) -> dict[str, Any]:
    cold = seconds(lambda: diff(before, after), times=1)
    found = diff(before, after)
    assert apply(found, before).key == after.key
    row: dict[str, Any] = {"machine": machine, "case": case, "operators": f"{len(before)}, {len(after)}"}
    row |= {"removed": len(found.removed), "added": len(found.added), "changed": len(found.differences)}
    row |= {"cold": cold, "diff": seconds(lambda: diff(before, after))}
    row["diff_process"] = seconds(lambda: diff(before, after), time.process_time)
    row["apply"] = seconds(lambda: apply(found, before))
    row["diff_kB"] = len(json.dumps(to_json(found))) / 1e3
    row |= {form: seconds(lambda form=form: said(before, after, form)) for form in ("text", "json", "html", "dot")}
    return row | {"target": TARGET, "met": max(cold, row["diff"]) <= TARGET}


def main() -> None:
    cases, whole = asked(__doc__, MACHINES)
    rows = []
    for name in cases:
        serial, fast, lean = graphs(unity.Machine.grid(*MACHINES[name]))
        pairs = {"captured, fastest": (serial, fast), "fastest, leanest": (fast, lean), "fastest, itself": (fast, fast)}
        rows += [row_of(name, case, *pair) for case, pair in pairs.items()]
    show("seconds to compare two graphs, and to compare and show them", rows)
    if whole:
        record("diff", rows, target=TARGET)


if __name__ == "__main__":
    main()
