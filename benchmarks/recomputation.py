"""Recomputed layers against checkpoints by hand, at several memory limits.

`python -m benchmarks.recomputation`. The models have no `jax.checkpoint`, on a DGX H100. The limits are a device's memory, and
`PARTS` of the memory of the fastest plan. By hand is a checkpoint around every layer, around every second one, and around groups
of about the root of their number, which save nothing inside, and around every layer under policies of MaxText's: "minimal", all
products without batch dimensions, and `named_products.POLICIES`, named ones; "every layer" is its "full". Each has its own exact
search of shardings. The layers are those around which the model's builder puts checkpoints. "kept" recomputes none. Seconds of a
step are predicted; those of the choice are of the processor, and count everything after capture.

The names are given to the products themselves, before biases and rotations, where MaxText gives them to what attention reads.
"save_dot_except_mlpwi" is "save_dot_except_mlp" here, for the last product of a layer is not computed again, and there are none of
the policies that offload. Most deep models are in a scan, whose search is many times as fast: every step of it is recomputed alike,
so that "every second" and "groups" are "every layer" there. GPT-2 small, the U-Net, ResNet-200 and DLRM are written out.
"""

from __future__ import annotations

import datetime
import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.models import get
from benchmarks.named_products import POLICIES, names_of, with_names, with_policy
from benchmarks.record import record_cases, show
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured, capture
from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED
from unity.pcg.propagation.nested.scan_programs import inside
from unity.search.cost.assembly import Listed
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.transforms.recomputing import LayeredProgram, RecomputingChoice, RecomputingWish, best, recomputing
from unity.transforms.recomputing.layers import Span, equations_in_layers, together
from unity.transforms.recomputing.recomputing import Policy

MACHINE = Machine.preset("dgx-h100")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3-8B, scan": ("llama3_8b", {"seq": 4096, "scan": True}),
    "Mixtral 8x7B, scan": ("mixtral_8x7b", {"seq": 4096, "scan": True}),
    "GPT-2": ("gpt2_padded", {"batch": 512}),
    "GPT-2 XL, scan": ("gpt2_xl", {"batch": 256, "vocab": 50304, "compute": "bfloat16", "scan": True}),
    "ViT-L, scan": ("vit_large", {"batch": 4096, "scan": True}),
    "T5-large, scan": ("t5_large", {"batch": 1024, "scan": True}),
    "U-Net": ("unet_latents", {"batch": 512}),
    "RWKV-7, scan": ("rwkv7_1.5b", {"batch": 128, "scan": True}),
    "Mamba-2, scan": ("mamba2_1.3b", {"batch": 256, "scan": True}),
    "DLRM": ("dlrm_summit", {"batch": 2**22}),
    "ResNet-200": ("resnet200", {"batch": 4096}),
}
DETECTED = ("DLRM",)  # models whose builders put no checkpoints around layers
PARTS = (1.0, 0.7, 0.5, 0.4, 0.3, 0.2)


@dataclass(eq=False)
class Case:
    """A model, and the searches of its program and of those with checkpoints by hand.

    Args:
        captured: The model without checkpoints.
        layers: The layers around which a programmer puts them.
    """

    captured: Captured
    layers: Sequence[Span]
    listed: Listed = field(default_factory=Listed)

    def search(self, captured: Captured) -> Search:
        return Search(captured.graph, captured.differentiated, MACHINE, Training(), listed=self.listed)

    def by_hand(self) -> dict[str, Search]:
        """The searches by what is recomputed; a scan's step is recomputed in all of them."""
        kept = {"kept": self.search(self.captured)}
        return kept | {name: self.search(program) for name, program in (*self.groups(), *self.policies())}

    def groups(self) -> Iterator[tuple[str, Captured]]:
        """Yield the programs with checkpoints that save nothing, or all products without batch dimensions."""
        program = LayeredProgram(self.captured.body)
        ways: dict[str, tuple[Sequence[Span], Policy]] = {
            "every layer": (self.layers, "nothing"),
            "every second": (self.layers[::2], "nothing"),
            "groups": (together(self.layers, round(math.sqrt(len(self.layers)))), "nothing"),
            "minimal": (self.layers, "products"),
        }
        for name, (own, saved) in ways.items():
            if spans := program.spans(own):
                yield name, recomputing(self.captured, spans, saved, self.captured.bodies).after

    def policies(self) -> Iterator[tuple[str, Captured]]:
        """Yield the programs with checkpoints that save named products, where the layers have some."""
        spans = LayeredProgram(self.captured.body).spans(self.layers)
        full = recomputing(self.captured, spans, known=self.captured.bodies).after
        named = with_names(full)
        for policy, saved in POLICIES.items():
            if names_of(named).issuperset(saved):
                yield policy, with_policy(named, saved)

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


def written_layers(plain: Body, marked: Body) -> list[Span]:
    """Return the layers of a program around which its author puts checkpoints.

    Args:
        plain: The program without checkpoints.
        marked: The program with them.
    """
    primitives, spans = list[str](), list[Span]()
    for e in marked.equations:
        layer = inside(e) if e.name in REMATERIALIZED else None
        if layer is not None:
            spans.append((len(primitives), len(primitives) + len(layer.equations)))
        primitives += (e.name,) if layer is None else layer.primitives
    if tuple(primitives) != plain.primitives:
        raise ValueError("expected the two programs to differ in their checkpoints alone")
    numbers = equations_in_layers(plain)
    return [(bisect_left(numbers, start), bisect_left(numbers, stop)) for start, stop in spans]


def case_of(name: str) -> Case:
    """Return a model with its layers: those of its author, or those that unity detects where the author has no checkpoints."""
    model, sizes = MODELS[name]
    captured, *others = (
        capture(built.loss, built.params, built.batch)
        for built in (get(model, **sizes), *(() if name in DETECTED else (get(model, **sizes, remat=True),)))
    )
    detected = LayeredProgram(captured.body).chain.repeated
    return Case(captured, written_layers(captured.body, others[0].body) if others else detected)


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the rows of a model."""
    rows = case_of(name).rows(name)
    show("recomputed layers", rows)
    return rows


def main() -> None:
    record_cases("recomputation", __doc__, MODELS, "model", rows_of, device=MACHINE.name)


if __name__ == "__main__":
    main()
