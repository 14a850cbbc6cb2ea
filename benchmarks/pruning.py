"""What is lost by the values that a first search leaves out, and what a second search around its result wins back.

`python -m benchmarks.pruning`. The reference is exact search over every value in every order where that is possible (its time is
in the table), else the best that any of the searches found: then losses are lower bounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from benchmarks.models import get
from benchmarks.models.model import Model
from benchmarks.record import asked, record, show
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured, capture
from unity.search.cost.assembly import Assembled, assemble
from unity.search.cost.cost import Training, site_cost
from unity.search.cost.refinement import refined
from unity.search.solver.minimizer import minimize
from unity.search.solver.problem import Point
from unity.search.space.configurations import EXACT, Limits, domain_of_picks, fits, shapes_of

VARIANTS: dict[str, tuple[Limits, ...] | None] = {
    "2 choices, waste 2": (Limits(2, 2, 2.0),),
    "2 and 3, waste 2": (Limits(2, 3, 2.0),),
    "3 choices, waste 4": (Limits(3, 3, 4.0),),
    "all, in one order": EXACT,
    "ladder": None,
}
LARGEST = 1100  # values of a site for which all orders are tried, or limits are wide
FEW, MANY = Machine.grid(2, 8, "v100"), Machine.grid(8, 8, "v100")
HALF = Machine.grid(4, 8, "v100")


def cases() -> dict[str, tuple[Callable[[], Model], Machine]]:
    return {
        "mlp, 1x8": (lambda: get("mlp", layers=6), Machine.grid(1, 8, "v100")),
        "rnnlm, 1x8": (lambda: get("rnnlm"), Machine.grid(1, 8, "v100")),
        "gpt 1 layer, 1x8": (lambda: get("gpt2_padded", layers=1), Machine.grid(1, 8, "v100")),
        "vgg16, 2x4": (lambda: get("vgg16"), Machine.grid(2, 4, "v100")),
        "mlp, 2x8": (lambda: get("mlp", layers=6), FEW),
        "dlrm_summit, 2x8": (lambda: get("dlrm_summit"), FEW),
        "candle_uno, 2x8": (lambda: get("candle_uno"), FEW),
        "alexnet, 2x8": (lambda: get("alexnet"), FEW),
        "rnnlm, 2x6": (lambda: get("rnnlm", batch=48), Machine.grid(2, 6, "v100")),
        "mlp, 4x8": (lambda: get("mlp", layers=6), HALF),
        "candle_uno, 4x8": (lambda: get("candle_uno"), HALF),
        "dlrm_summit, 4x8": (lambda: get("dlrm_summit"), HALF),
        "lenet5, 4x8": (lambda: get("lenet5"), HALF),
        "gpt 4 layers, 4x8": (lambda: get("gpt2_padded", layers=4, batch=32), HALF),
        "mlp, 8x8": (lambda: get("mlp"), MANY),
        "dlrm_summit, 8x8": (lambda: get("dlrm_summit"), MANY),
        "candle_uno, 8x8": (lambda: get("candle_uno"), MANY),
        "rnnlm, 8x8": (lambda: get("rnnlm"), MANY),
        "alexnet, 8x8": (lambda: get("alexnet"), MANY),
        "gpt 4 layers, 8x8": (lambda: get("gpt2_padded", layers=4, batch=64), MANY),
    }


def every(assembled: Assembled) -> Assembled | None:
    """The same graph with every value in every order; nothing if these are too many."""
    machine = assembled.machine
    domains, costs = list(assembled.domains), list(assembled.costs)
    for same in {id(d): [s for s, other in enumerate(domains) if other is d] for d in assembled.domains}.values():
        site, cs = assembled.opened.sites[same[0]], domains[same[0]].choices
        if len(cs) ** len(machine.axes) > 100 * LARGEST:
            return None
        picks = np.array(list(product(range(len(cs)), repeat=len(machine.axes))), np.int16)
        picks = picks[fits(cs, shapes_of(site), picks, machine.axes)]
        if len(picks) > LARGEST:
            return None
        whole = domain_of_picks(cs, picks, shapes_of(site), machine.axes)
        for s in same:
            domains[s], costs[s] = whole, site_cost(site, whole, machine, assembled.training)
    return replace(assembled, domains=tuple(domains), costs=tuple(costs), port_costs={})


def fastest(assembled: Assembled) -> Point:
    return minimize(assembled.problem, [0.0])[0]


def compare(name: str, captured: Captured, machine: Machine) -> list[dict[str, Any]]:
    rows = []
    for variant, limits in VARIANTS.items():
        clock = time.process_time()
        assembled = assemble(captured.graph, captured.differentiated, machine, Training(), limits)
        values = max(map(len, assembled.domains))
        if limits is not None and values > LARGEST:
            continue
        first = fastest(assembled)
        between = time.process_time()
        _, second = refined(assembled, first, fastest, lambda p: p.time)
        seconds = {"first_process_seconds": between - clock, "second_process_seconds": time.process_time() - between}
        rows.append({"case": name, "limits": variant, "values": values, "first": first.time, "second": second.time, **seconds})
    whole, exact_time, clock = every(assembled), None, time.process_time()  # pyright: ignore[reportPossiblyUnboundVariable] (there is a variant)
    if whole is not None:
        exact_time = fastest(whole).time
    reference = exact_time or min(row["second"] for row in rows)
    for row in rows:
        row["first_loss"], row["second_loss"] = row.pop("first") / reference - 1, row.pop("second") / reference - 1
        row["reference_ms"], row["reference"] = reference * 1e3, "every value" if whole else "best found"
        row["reference_process_seconds"] = time.process_time() - clock if whole else None
    return rows


def main() -> None:
    known = cases()
    names, whole = asked(__doc__, known)
    rows = []
    for name in names:
        model, machine = known[name]
        built = model()
        rows += compare(name, capture(built.loss, built.params, built.batch), machine)
        last = rows[-1]
        print(f"{name}: {last['first_loss']:.2%}, then {last['second_loss']:.3%}, from {last['reference']}", flush=True)
    show("Loss in predicted time", rows)
    for variant in VARIANTS:
        own = [r for r in rows if r["limits"] == variant]
        if own:
            first, second = (max(r[k] for r in own) for k in ("first_loss", "second_loss"))
            mean = math.fsum(r["second_loss"] for r in own) / len(own)
            print(f"{variant}: worst loss {first:.1%} in a first search, {second:.2%} (mean {mean:.3%}) after a second")
    if whole:
        record("pruning", rows)


if __name__ == "__main__":
    main()
