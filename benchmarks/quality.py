"""Predicted time of the plan against data parallelism, FSDP, tensor parallelism and all their mixes, under the same cost.

`python -m benchmarks.quality`. A baseline is a mesh cut in two: on the first axes (data) every operator splits its samples as
far as they go; on the last ones (tensor) every product with a weight splits that weight, as Megatron's do, and everything
else but the samples is free. Weights are stored whole along the data axes, or in pieces ("fsdp"). What a baseline leaves open
is chosen by exact search, so it is the best of its kind.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np

from benchmarks.models import get
from benchmarks.models.model import Model
from benchmarks.record import record, show
from unity.pcg.capture import capture
from unity.search.assemble import Assembled
from unity.search.configurations import fits, made, ranks, shapes_of
from unity.search.cost import Training, site_cost
from unity.search.machine import Machine
from unity.search.minimizer import Minimizer
from unity.search.offers import HEAVY, offered
from unity.search.problem import Point
from unity.search.session import Search
from unity.search.sites import Site, Sites

MACHINES = {8: Machine.grid(1, 8, "a100"), 64: Machine.grid(8, 8, "a100"), 192: Machine.grid(32, 6, "v100")}
MODELS: dict[str, dict[str, Any]] = {  # sizes, and samples for each device
    "gpt2_padded": {"batch": 4},
    "bert_large": {"batch": 4},
    "vgg16": {"batch": 16},
    "inception_v3": {"batch": 16},
    "resnext50": {"batch": 16},
    "dlrm_summit": {"batch": 64},
    "rnnlm": {"batch": 16},
    "mlp": {"batch": 16},
    "candle_uno": {"batch": 16},
}
IDLE = ("unused", "replicated")


@dataclass(frozen=True)
class Baseline:
    """A strategy by its name: how many axes split the samples, and whether weights are stored in pieces along those."""

    data: int
    fsdp: bool

    def name(self, axes: int) -> str:
        tensor = axes - self.data
        kind = "fsdp" if self.fsdp else "data"
        return kind if not tensor else "tensor" if not self.data else f"{kind} {self.data} x tensor {tensor}"


def baselines(axes: int) -> list[Baseline]:
    return [Baseline(k, fsdp) for k in range(axes, -1, -1) for fsdp in (False, True) if k or not fsdp]


class Restricted:
    """An opened graph, whose domains are made anew for every baseline."""

    def __init__(self, search: Search) -> None:
        self.search, self.base = search, search.assembled
        opened = self.base.opened
        self.found = offered(opened.sites)
        self.rank = ranks(opened.sites, self.found)
        data = [s for s, site in enumerate(opened.sites) if site.kind == "input" and not site.weight]
        pairs = ((c, r) for s in data for c, r in zip(self.found[s], self.rank[s], strict=True))
        self.samples = {r for c, r in pairs if c.results[0].kind == "P" and c.results[0].dim == 0}
        self.weights = weights_only(opened)

    def on(self, baseline: Baseline) -> Assembled:
        """The graph with the values that the baseline allows."""
        base, machine, domains, costs = self.base, self.base.machine, [], []
        shared: dict[tuple, tuple] = {}
        for s, site in enumerate(base.opened.sites):
            # equal sites share a domain of the search's own; whether they take their operands from weights may still differ
            same = (id(base.domains[s]), self.weights[s], tuple(self.weights[p.source] for p in site.ports))
            if same not in shared:
                cs, picks = self.found[s], np.array(list(self.picks(s, site, baseline)), np.int16)
                picks = picks[fits(cs, shapes_of(site), picks, machine.axes)]
                near = made(cs, self.most_split(s, site, picks, baseline), shapes_of(site), machine.axes)
                shared[same] = near, site_cost(site, near, machine, base.training)
            domains.append(shared[same][0])
            costs.append(shared[same][1])
        return replace(base, domains=tuple(domains), costs=tuple(costs), known={})

    def picks(self, s: int, site: Site, baseline: Baseline) -> Iterator[tuple[int, ...]]:
        cs, n = self.found[s], len(self.base.machine.axes)
        idle = [i for i, c in enumerate(cs) if c.name in IDLE]
        split = [i for i in range(len(cs)) if self.along_data(s, site, i, baseline)]
        tensor = [i for i in range(len(cs)) if self.along_tensor(s, site, i)]
        first = {(i,) * k + (j,) * (baseline.data - k) for k in range(baseline.data + 1) for i in split or idle for j in idle}
        last = [p for p in combinations_with_replacement(tensor, n - baseline.data) if len(set(p)) <= 2]
        yield from (a + b for a, b in product(sorted(first), last))

    def along_data(self, s: int, site: Site, i: int, baseline: Baseline) -> bool:
        """Whether a choice is what the data axes are for."""
        if self.weights[s]:
            return baseline.fsdp and self.found[s][i].name not in IDLE
        return self.rank[s][i] in self.samples

    def along_tensor(self, s: int, site: Site, i: int) -> bool:
        """Whether a choice may be taken on the tensor axes: not the samples; of a product with a weight, what splits that."""
        choice = self.found[s][i]
        if choice.name in IDLE:
            return True
        if self.rank[s][i] in self.samples:
            return False
        own = [p for p, port in enumerate(site.ports) if self.weights[port.source]]
        if site.node is None or site.node.kind not in HEAVY or self.weights[s] or not own:
            return True
        return any(choice.operands[p].kind == "P" for p in own)

    def most_split(self, s: int, site: Site, picks: np.ndarray, baseline: Baseline) -> np.ndarray:
        """The values that split most on the data axes (none have to, where nothing is to be split)."""
        cs, axes = self.found[s], self.base.machine.axes[: baseline.data]
        split = np.array([self.along_data(s, site, i, baseline) for i in range(len(cs))], bool)
        degree = np.prod(np.where(split[picks[:, : baseline.data]], [a.size for a in axes], 1), axis=1)
        return picks[degree == degree.max()] if len(axes) else picks


def weights_only(opened: Sites) -> list[bool]:
    """For every site, whether it is made of nothing but weights."""
    found: list[bool] = []
    for site in opened.sites:
        sources = [found[p.source] for p in site.ports if p.source < len(found)]
        found.append(site.weight if site.kind == "input" else bool(sources) and all(sources))
    return found


def fastest(assembled: Assembled, weight: float = 0.0) -> Point | None:
    found = Minimizer(assembled.problem).at([weight])
    return found[0] if found else None


def compare(name: str, devices: int, with_memory: bool) -> dict[str, Any]:
    """One model on one machine: the plan and every baseline, without and with too little memory for the fastest."""
    machine, sizes = MACHINES[devices], MODELS[name]
    model: Model = get(name, **{**sizes, "batch": sizes["batch"] * devices})
    captured = capture(model.loss, model.params, model.batch)
    search = Search(captured.graph, captured.differentiated, machine, Training())
    clock = time.process_time()
    plan = search.fastest
    seconds = time.process_time() - clock
    restricted = Restricted(search)
    times: dict[str, float | None] = {}
    least, leanest = math.inf, ""
    for baseline in baselines(len(machine.axes)):
        assembled = restricted.on(baseline)
        point, key = fastest(assembled), baseline.name(len(machine.axes))
        times[key] = None if point is None else point.time * 1e3
        if with_memory and point is not None:
            lean = fastest(assembled, math.inf)
            memory = search.candidate(assembled, lean).memory if lean else math.inf
            least, leanest = min((least, leanest), (memory, key))
    known = {k: t for k, t in times.items() if t is not None}
    best = min(known, key=lambda k: known[k])
    row = {
        "model": name,
        "devices": devices,
        "plan_ms": plan.time * 1e3,
        "best": best,
        "best_ms": known[best],
        "gain": known[best] / (plan.time * 1e3) - 1,
        "over_data": known["data"] / (plan.time * 1e3) - 1,
        "over_fsdp": known["fsdp"] / (plan.time * 1e3) - 1,
        "over_tensor": None if times["tensor"] is None else known["tensor"] / (plan.time * 1e3) - 1,
        "search_process_seconds": seconds,
        "baselines_ms": times,
    }
    if with_memory:
        found = search.under(least)
        row |= {"leanest_baseline": leanest, "leanest_baseline_GB": least / 1e9, "leanest_plan_GB": search.leanest.memory / 1e9}
        row |= {"fits_where_a_baseline_does": found is not None and found.memory <= least}
        row |= {"none_below_the_leanest": search.under(search.leanest.memory * 0.999) is None}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--devices", nargs="*", type=int, default=list(MACHINES))
    options = parser.parse_args()
    rows = []
    for devices in options.devices:
        for name in options.models:
            rows.append(compare(name, devices, with_memory=True))
            print(f"{name} on {devices}: {rows[-1]['gain']:+.2%} over {rows[-1]['best']}", flush=True)
    show("Predicted milliseconds of a step", [{k: v for k, v in row.items() if k != "baselines_ms"} for row in rows])
    slower = [row for row in rows if row["gain"] < -1e-9]
    print(f"{len(rows)} compared; slower than a baseline: {[(r['model'], r['devices'], r['gain']) for r in slower] or 'none'}")
    if set(options.models) == set(MODELS) and set(options.devices) == set(MACHINES):
        record("quality", rows, samples_per_device={k: v["batch"] for k, v in MODELS.items()})


if __name__ == "__main__":
    main()
