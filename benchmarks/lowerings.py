"""Bytes that compiled steps send in both lowerings of a plan, against the plan.

`python -m benchmarks.lowerings [model ...]`. The exact lowering is one `shard_map`; the constrained one is `plan.constrained()`,
whose collectives XLA's partitioner chooses. Steps of ten small models in float32 for eight devices, with gradients, by fully
sharded data parallelism and by the leanest plan, are compiled for virtual CPU devices, and nothing is run.
"""

from __future__ import annotations

from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import unity  # noqa: E402
from benchmarks.models import tiny  # noqa: E402
from benchmarks.record import asked, record, show  # noqa: E402
from unity.exec.compiled.check import Check  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "alexnet": {},
    "resnet50": {},
    "gpt2_padded": {},
    "gpt3_6.7b_scan": {"vocab": 64, "compute": "float32"},
    "llama3_8b": {},
    "bert_large": {"vocab": 64},
    "vit_large": {},
    "dlrm": {},
    "rnnlm": {"vocab": 64},
}
PLANS: dict[str, dict[str, Any]] = {
    "FSDP": {"search": "fsdp"},
    "leanest": {"objective": "memory", "budget": 0, "pipelines": False, "branches": False},
}
EIGHT = unity.Machine.grid(1, 8, "a100")
BYTES = 4  # of an element: all values that are sent are of 32 bits


def rows_of(name: str) -> list[dict[str, Any]]:
    """Compile two plans of a model in both lowerings."""
    model, rows = tiny(name, **MODELS[name]), []
    for kind, options in PLANS.items():
        plan = unity.optimize(model.loss, model.params, model.batch, machine=EIGHT, progress=False, **options)
        exact, constrained = plan.check(), plan.check(partitioned=True)
        rows.append(
            {
                "model": name,
                "plan": kind,
                "planned": BYTES * exact.total.predicted,
                "exact": BYTES * exact.total.compiled,
                "constrained": BYTES * constrained.total.compiled,
                "constrained / planned": constrained.total.compiled / max(exact.total.predicted, 1),
                "kinds": {"exact": kinds(exact), "constrained": kinds(constrained)},
            }
        )
    return rows


def kinds(check: Check) -> dict[str, int]:
    """Return the compiled bytes of every kind of collective."""
    return {line.kind: BYTES * line.compiled for line in check.lines if line.compiled}


def main() -> None:
    """Compile the chosen models, show the rows, and record those of all."""
    names, every = asked(__doc__, MODELS)
    rows = []
    for name in names:
        rows += rows_of(name)
        show("bytes of one device's collectives in a step", [{k: v for k, v in row.items() if k != "kinds"} for row in rows[-2:]])
    if every:
        record("lowerings", rows)


if __name__ == "__main__":
    main()
