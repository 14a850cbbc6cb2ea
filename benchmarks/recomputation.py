"""Recomputed layers against checkpoints by hand, at several memory limits.

`python -m benchmarks.recomputation`. The models have no `jax.checkpoint`, on a DGX H100. The limits are a device's memory, and
`PARTS` of the memory of the fastest plan. By hand is a checkpoint around every layer, around every second one, and around groups
of about the root of their number, each with the same exact search of shardings; the layers are those that unity detects. "kept"
recomputes none. Seconds of a step are predicted; those of the choice are of the processor, and count everything after capture.
"""

from __future__ import annotations

import datetime
import math
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.models import get
from benchmarks.record import record_cases, show
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured, capture
from unity.search.cost.assembly import Listed
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.transforms.recomputing import LayeredProgram, RecomputingChoice, RecomputingWish, best, recomputing
from unity.transforms.recomputing.layers import together

MACHINE = Machine.preset("dgx-h100")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3_8b": ("llama3_8b", {"seq": 4096}),
    "llama3_8b, scan": ("llama3_8b", {"seq": 4096, "scan": True}),
    "mixtral_8x7b": ("mixtral_8x7b", {"seq": 4096}),
    "gpt2": ("gpt2_padded", {"batch": 512}),
    "vit_large": ("vit_large", {"batch": 4096}),
    "resnet50": ("resnet50", {"batch": 8192}),
}
PARTS = (1.0, 0.7, 0.5, 0.3)


@dataclass(eq=False)
class Case:
    """A model, and the searches of its program and of those with checkpoints by hand."""

    captured: Captured
    listed: Listed = field(default_factory=Listed)

    def search(self, captured: Captured) -> Search:
        return Search(captured.graph, captured.differentiated, MACHINE, Training(), listed=self.listed)

    def by_hand(self) -> dict[str, Search]:
        """The searches by what is recomputed; a scan's step is recomputed in all of them."""
        segments = LayeredProgram(self.captured.body)
        repeated = segments.chain.repeated
        ways = {
            "every layer": repeated,
            "every second": repeated[::2],
            "groups": together(repeated, round(math.sqrt(len(repeated)))),
        }
        spans = {name: segments.spans(own) for name, own in ways.items()}
        programs = {name: recomputing(self.captured, own, known=self.captured.bodies) for name, own in spans.items() if own}
        return {"kept": self.search(self.captured)} | {name: self.search(made.after) for name, made in programs.items()}

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return one row for each limit."""
        by_hand, rows = self.by_hand(), []
        most = by_hand["kept"].fastest.memory
        for limit in sorted({MACHINE.device.memory, *(part * most for part in PARTS)}):
            started = time.process_time()
            keeping = by_hand["kept"]
            kept = keeping.under(limit)
            than = None if kept is None else (keeping, kept)
            wish = RecomputingWish(
                self.search, partial(Search.under, memory=limit), lambda c: (c.time, c.memory), than, limit=limit
            )
            choice = RecomputingChoice() if keeping.fastest.memory <= limit else best(self.captured, wish)
            chosen = kept if choice.best is None else choice.best.candidate
            seconds = time.process_time() - started
            under = {way: search.under(limit) for way, search in by_hand.items()}
            times = {way: None if c is None else c.time for way, c in under.items()}
            least = min((t for t in times.values() if t is not None), default=math.inf)
            rows.append({
                "model": name, "date": datetime.date.today().isoformat(), "GB": limit / 1e9,
                "unity s": chosen and chosen.time, **times,
                "unity / best by hand": chosen and chosen.time / least, "choice, CPU s": seconds,
                "recomputed": "" if choice.best is None else str(choice.best.transformation),
            })  # fmt: skip
        return rows


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the rows of a model."""
    model, sizes = MODELS[name]
    built = get(model, **sizes)
    rows = Case(capture(built.loss, built.params, built.batch)).rows(name)
    show("recomputed layers", rows)
    return rows


def main() -> None:
    record_cases("recomputation", __doc__, MODELS, "model", rows_of, device=MACHINE.name)


if __name__ == "__main__":
    main()
