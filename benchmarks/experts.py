"""Plans of mixtures of experts against expert parallelism by hand: predicted step, memory and planning time.

`python -m benchmarks.experts`. Mixtral 8x7B, Qwen3-30B-A3B (128 experts) and layers of DeepSeek-V3 (256 experts and a shared one),
on 8 and 64 H100s, with a scan over rematerialized layers. Tokens are dispatched to places of limited number (`capacity`), or sorted
by expert and multiplied by `ragged_dot`, without dropping any (`sorted`).

By hand, each device has some of the experts, in a node or over all devices, and tokens are sent to their experts and back by
all-to-alls of exactly the rows that move; all weights are stored in pieces, gathered over all other devices, and their gradients
scattered. That computes what the plan does, evenly shared, so its step is the plan's computing and these collectives at our prices.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import unity
from benchmarks.models.mixtral import mixtral
from benchmarks.models.model import Model
from benchmarks.record import BESIDE, asked, by_case, in_order, record, results, show
from unity.machine.collectives import collective_seconds
from unity.pcg.types.axis import Axis

SEQUENCE, SAMPLES = 4096, 2  # of a sample; for each device
ROOMY = 1e15  # bytes
MODELS: Mapping[str, dict[str, Any]] = {
    "Mixtral 8x7B": {},
    "Qwen3-30B-A3B": {
        "layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "feed_forward": 768, "experts": 128, "chosen": 8, "vocab": 151936,
    },
    "DeepSeek-V3, 4 layers": {
        "layers": 4, "hidden": 7168, "heads": 56, "kv_heads": 8, "feed_forward": 2048, "experts": 256, "chosen": 8, "shared": 2048,
        "vocab": 129280,
    },
}  # fmt: skip
FORMS: Mapping[str, dict[str, Any]] = {"capacity": {"capacity": 1.25}, "sorted": {"capacity": None}}
CASES = {f"{model}, {form}, {nodes * 8}": (model, form, nodes) for model in MODELS for form in FORMS for nodes in (1, 8)}


def model_of(name: str, form: str, devices: int) -> Model:
    return mixtral(**{"seq": SEQUENCE, "batch": SAMPLES * devices, "scan": True, "remat": True, **MODELS[name], **FORMS[form]})


def by_hand(model: Model, name: str, machine: unity.Machine, experts: Sequence[Axis]) -> float:
    """Return the seconds of the collectives of a step by hand, with the experts over some axes.

    Each weight is gathered in bfloat16 for either pass, and its gradient scattered in float32. Rows go to their experts and back in
    the forward pass, when it is recomputed, and in the backward pass.
    """
    options = MODELS[name]
    others = [axis for axis in machine.axes if axis not in experts]
    total, parts = 0.0, int(np.prod([axis.size for axis in experts]))
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        of_experts = "experts" in keys and "router" not in keys
        layers = leaf.shape[0] if "blocks" in keys else 1
        size = leaf.size / layers / (parts if of_experts else 1)
        axes = others if of_experts else machine.axes
        if axes:
            gathered = collective_seconds(machine, "all-gather", axes, 2 * size)
            total += layers * (2 * gathered + collective_seconds(machine, "reduce-scatter", axes, 4 * size))
    rows = SAMPLES * SEQUENCE * options.get("chosen", 2) * options.get("hidden", 4096)
    return total + 6 * options.get("layers", 32) * collective_seconds(machine, "all-to-all", experts, 2 * rows)


def measured(case: str) -> dict[str, Any]:
    """Plan a case, and price expert parallelism by hand."""
    name, form, nodes = CASES[case]
    machine = unity.Machine.grid(nodes, 8, "h100")
    model = model_of(name, form, machine.devices)
    clock = time.process_time()
    plan = unity.optimize(model.loss, model.params, model.batch, machine=machine, budget=0, memory_limit=ROOMY, progress=False)
    seconds = time.process_time() - clock
    side = plan.inspect.diff(plan).before
    computing, sent = sum(w.seconds for w in side.work), sum(t.seconds for t in side.talk)
    inner = [axis for axis in machine.axes if axis.name.startswith("d")]
    divides = MODELS[name].get("experts", 8) % machine.devices == 0
    places = {"in a node": inner, **({"over all": list(machine.axes)} if nodes > 1 and divides else {})}
    hand = {f"by hand, {where} ms": 1e3 * (computing + by_hand(model, name, machine, axes)) for where, axes in places.items()}
    return {
        "case": case,
        "ms": plan.time * 1e3,
        "computing ms": computing * 1e3,
        "communicating ms": sent * 1e3,
        **hand,
        "GB": plan.memory / 1e9,
        "planned s": seconds,
    }


def main() -> None:
    chosen, every = asked(__doc__, CASES, BESIDE)
    rows = {} if every else by_case(results("experts")["rows"], "case")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # this version's own plans
        for case in chosen:
            rows[case] = [measured(case)]
            record("experts", in_order(rows, CASES), samples_per_device=SAMPLES, sequence=SEQUENCE)
    show("mixtures of experts", [row for case in chosen for row in rows[case]])


if __name__ == "__main__":
    main()
