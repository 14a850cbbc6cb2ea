"""Sizes that the devices do not divide: plans without padding, with it, and of the even neighbour.

`python -m benchmarks.odd_sizes`. On a DGX H100, or four of them. Each model has an odd size; its neighbour has the next size that
all devices divide. With `padding=True` a step pads what it reads; with `pack=True` as well, weights are stored padded. Seconds of a
step and bytes on a device are predicted; CPU seconds are of the whole call.
"""

from __future__ import annotations

import time
from typing import Any

import unity
from benchmarks.models import get
from benchmarks.models.recommenders import CRITEO_KAGGLE
from benchmarks.record import record_cases, show
from unity.machine.machine import Machine

ONE, FOUR = Machine.preset("dgx-h100"), Machine.preset("dgx-h100-4x8")
KAGGLE = tuple(-(-n // 8) * 8 for n in CRITEO_KAGGLE)
Case = tuple[str, dict[str, Any], dict[str, Any], Machine]
CASES: dict[str, Case] = {  # the model, its sizes, the sizes of the even neighbour, and the machine
    "GPT-2, 50,257 tokens": ("gpt2", {"batch": 4}, {"vocab": 50264}, ONE),
    "GPT-2, 50,257 tokens, 32 devices": ("gpt2", {"batch": 8}, {"vocab": 50272}, FOUR),
    "GPT-2 in a scan, 50,257 tokens": ("gpt2", {"batch": 4, "scan": True}, {"vocab": 50264}, ONE),
    "BERT, 30,522 tokens": ("bert_large", {"batch": 4, "layers": 6}, {"vocab": 30528}, ONE),
    "GPT-2, 25 heads": (
        "gpt2",
        {"batch": 2, "layers": 4, "hidden": 1600, "heads": 25, "vocab": 50264},
        {"hidden": 2048, "heads": 32},
        ONE,
    ),
    "GPT-2, 7 samples": ("gpt2", {"batch": 7, "vocab": 50264}, {"batch": 8}, ONE),
    "ViT, 250 samples": ("vit_large", {"batch": 250, "layers": 6}, {"batch": 256}, ONE),
    "AlexNet, 250 samples": ("alexnet", {"batch": 250}, {"batch": 256}, ONE),
    "GPT-2, 197 positions": ("gpt2", {"batch": 2, "layers": 4, "seq": 197, "vocab": 50264}, {"seq": 200}, ONE),
    "perceptron, 4,097 units": ("mlp", {"width": 4097}, {"width": 4104}, ONE),
    "Mixtral, 7 experts": ("mixtral_8x7b", {"layers": 2, "experts": 7, "batch": 8, "seq": 1024}, {"experts": 8}, ONE),
    "DLRM, tables of 1,000,003 rows of 63": (
        "dlrm",
        {"tables": (1000003,) * 4, "width": 63, "batch": 4096},
        {"tables": (1000008,) * 4, "width": 64},
        ONE,
    ),
    "DLRM on Kaggle, rows of 5": (
        "dlrm_kaggle",
        {"batch": 4096, "width": 5, "bottom": (13, 512, 256, 64, 5)},
        {"tables": KAGGLE, "width": 8, "bottom": (13, 512, 256, 64, 8)},
        ONE,
    ),
}
WAYS: dict[str, dict[str, Any]] = {"odd": {}, "padded": {"padding": True}, "packed": {"padding": True, "pack": True}, "even": {}}


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return one row for each way to plan a case."""
    model, sizes, neighbour, machine = CASES[name]
    rows = []
    for way, options in WAYS.items():
        built, started = get(model, **(sizes | neighbour if way == "even" else sizes)), time.process_time()
        plan = unity.optimize(
            built.loss, built.params, built.batch, machine=machine, memory_limit=1e15, search="captured", pipelines=False,
            branches=False, progress=False, **options,
        )  # fmt: skip
        seconds = time.process_time() - started
        leanest = plan.program.family.search.leanest
        rows.append({
            "case": name, "devices": machine.devices, "way": way, "ms": 1e3 * plan.time, "GB": plan.memory / 1e9,
            "leanest, GB": leanest.memory / 1e9, "CPU s": seconds,
            "transformations": "; ".join(map(str, plan.program.transformations)),
        })  # fmt: skip
    show("odd sizes", rows)
    return rows


def main() -> None:
    record_cases("odd_sizes", __doc__, CASES, "case", rows_of)


if __name__ == "__main__":
    main()
