"""How far plans are at most from the best sharding of their program, and how long it takes to know that.

`python -m benchmarks.bounds`. Each model is captured and searched without rewriting, on 8 A100s (some on 16). The limit is the
memory of the device; for many models it is also ("tight") halfway between the memory of the leanest and of the fastest strategy,
where residuals decide, which the bound does not count. Seconds are the process's: of the search, and of the bound after it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.models import get
from benchmarks.record import asked, record, show
from unity.base.gc_pause import uncollected
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.search.cost.cost import Training
from unity.search.session import Candidate, Search

CLOSE, FAR, MODELS = 0.02, 0.1, 20  # targets: a gap that 20 models must have, and one that all must have


@dataclass(frozen=True)
class Case:
    """A model with some sizes, on nodes of 8 A100s."""

    model: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 1
    tight: bool = True


CASES = {
    **{name: Case(name, {"batch": 512}) for name in ("mlp", "mlp_unity", "lenet5", "alexnet", "candle_uno", "dlrm", "dlrm_summit")},
    **{name: Case(name, {"batch": 512}) for name in ("dlrm_kaggle", "xdl", "rnnlm", "rnntc", "nmt")},
    **{name: Case(name, {"batch": 128}) for name in ("vgg16", "resnet50", "resnet101", "wide_resnet50", "resnext50_unity")},
    **{name: Case(name, {"batch": 128}, tight=False) for name in ("inception_v3", "inception_v3_unity", "resnext50")},
    **{name: Case(name, {"batch": 32}) for name in ("gpt2", "gpt2_padded", "bert_unity")},
    **{name: Case(name, {"batch": 32}, tight=False) for name in ("bert_large", "vit_large", "transformer_tensoropt")},
    **{name: Case(name, {"batch": 8}, tight=False) for name in ("gpt3_6.7b_scan", "llama3_8b", "mixtral_8x7b")},
    **{name: Case(name, {"batch": 256}, tight=False) for name in ("wide_resnet_tensoropt", "rnn_tensoropt")},
    **{f"{name}, 16": Case(name, {"batch": 512}, nodes=2, tight=False) for name in ("mlp", "candle_uno", "dlrm_summit")},
    **{f"{name}, 16": Case(name, {"batch": 256}, nodes=2, tight=False) for name in ("rnnlm", "vgg16", "gpt2_padded")},
}


def bounded(search: Search, limit: float, started: float) -> dict[str, Any]:
    """Return the plan's figures under a limit, and its gap, for a search that began at `started`."""
    candidate: Candidate | None = search.under(limit)
    searched = time.process_time()
    if candidate is None:
        return {"gap": None, "search": searched - started, "bound": 0.0, "note": "nothing fits"}
    bound = search.least_time(candidate.time, limit)
    return {
        "step_ms": candidate.time * 1e3,
        "gap": None if bound is None else candidate.time / bound - 1,
        "slower_than_fastest": candidate.time / search.fastest.time - 1,
        "search": searched - started,
        "bound": time.process_time() - searched,
    }


def compare(name: str, case: Case) -> list[dict[str, Any]]:
    """Return the rows of one case: with the device's memory, and with a tight limit."""
    model, machine = get(case.model, **case.sizes), Machine.grid(case.nodes, 8, "a100")
    captured = capture(model.loss, model.params, model.batch)
    search = Search(captured.graph, captured.differentiated, machine, Training())
    rows = [{"case": name, "limit": "device", **bounded(search, machine.device.memory, time.process_time())}]
    if case.tight:
        halfway = (search.leanest.memory + search.fastest.memory) / 2
        rows.append({"case": name, "limit": "tight", **bounded(search, halfway, time.process_time())})
    return rows


def main() -> None:
    names, whole = asked(__doc__, CASES)
    rows = list[dict[str, Any]]()
    for name in names:
        before = len(rows)
        with uncollected():
            rows += compare(name, CASES[name])
        for row in rows[before:]:
            gap = "no bound" if row["gap"] is None else f"at most {row['gap']:.3%}"
            print(f"{name}, {row['limit']}: {gap}; {row['search']:.1f} s, then {row['bound']:.1f} s", flush=True)
    show("Gaps", rows)
    device = [row["gap"] for row in rows if row["limit"] == "device" and row["gap"] is not None]
    targets = {"close": CLOSE, "far": FAR, "models": MODELS}
    close, far = sum(gap <= CLOSE for gap in device), sum(gap > FAR for gap in device)
    print(f"{close} of {len(device)} within {CLOSE:.0%}, {far} beyond {FAR:.0%}, median {statistics.median(device):.3%}")
    if whole:
        record("bounds", rows, targets=targets)


if __name__ == "__main__":
    main()
