"""Micro-batches against recomputed layers alone, at several memory limits.

`python -m benchmarks.micro_batches`. The models have no `jax.checkpoint`, on a DGX H100. The limits are `PARTS` of the memory of
the fastest plan. Without the option, layers are recomputed where that is needed; with `micro_batches=True`, the loss may also be
walked over micro-batches. Seconds of a step are predicted; CPU seconds are of the whole call.
"""

from __future__ import annotations

import datetime
import time
from typing import Any

import unity
from benchmarks.models import get
from benchmarks.record import record_cases, show
from unity.machine.machine import Machine

MACHINE = Machine.preset("dgx-h100")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {"gpt2": ("gpt2_padded", {"batch": 512})}
PARTS = (0.5, 0.3, 0.2)


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return one row for each limit."""
    model, sizes = MODELS[name]
    built, rows = get(model, **sizes), list[dict[str, Any]]()

    def planned(limit: float | None, micro_batches: bool) -> tuple[unity.Plan | None, float]:
        started = time.process_time()
        try:
            plan = unity.optimize(
                built.loss, built.params, built.batch, machine=MACHINE, memory_limit=limit, budget=0, pipelines=False,
                branches=False, micro_batches=micro_batches, progress=False,
            )  # fmt: skip
        except unity.InfeasibleError:
            plan = None
        return plan, time.process_time() - started

    fastest, _ = planned(1e15, False)
    assert fastest is not None
    for part in PARTS:
        limit = part * fastest.memory
        (without, seconds), (plan, more) = planned(limit, False), planned(limit, True)
        rows.append({
            "model": name, "date": datetime.date.today().isoformat(), "GB": limit / 1e9, "part": part, "fastest s": fastest.time,
            "without s": without and without.time, "without, CPU s": seconds, "with s": plan and plan.time, "with, CPU s": more,
            "transformations": "" if plan is None else "; ".join(map(str, plan.program.transformations)),
        })  # fmt: skip
        show("micro-batches", rows[-1:])
    return rows


def main() -> None:
    record_cases("micro_batches", __doc__, MODELS, "model", rows_of, device=MACHINE.name)


if __name__ == "__main__":
    main()
