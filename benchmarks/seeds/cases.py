"""What is run: models, machines and algorithms, by the figure or table of the paper that they are for.

A model has the sizes and the batch that the paper gives; the page names where they are this project's choice. Memory is counted as
the paper counts it: TensorOpt's and OptCNN's optimizers keep nothing for a weight, and only TensorOpt's figures have a limit.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, product
from typing import Any

from benchmarks.joint import BATCH
from benchmarks.seeds.dimensions import ABLATION, PIPELINE
from benchmarks.seeds.steps import BY_HAND, SEARCH, SIMULATED
from benchmarks.seeds.table5 import PUBLISHED
from unity.machine.hardware import Level
from unity.machine.machine import Machine
from unity.machine.presets import LINKS
from unity.planning.sub_machines import sub_machines

IN_TENSOROPT = "optcnn in tensoropt's space"
# What is no algorithm of the registry: this project's own searches (`run.py` says what each is).
OWN = (
    *("unity", "captured", "sequential", "unity-rules", "frontier", "tensoropt-frontier", "tensoropt-elimination", "mesh-frontier"),
    *ABLATION,
    *SIMULATED,
    PIPELINE,
    PUBLISHED,
    IN_TENSOROPT,
)


@dataclass(frozen=True)
class Case:
    """One algorithm on one model and machine. `scale` is what the figure varies, on its horizontal axis or as a series."""

    part: str
    model: str
    algorithm: str
    machine: Machine
    sizes: Mapping[str, Any] = field(default_factory=dict)
    scale: float | str = 0
    limit: float = math.inf
    slots: int = 0  # values that the optimizer keeps for each weight
    budget: float | None = None  # how long an algorithm may look, where the paper's own is too long: seconds, or a whole number of
    # proposals

    @cached_property
    def name(self) -> str:
        """A file's name, the same for the same case alone."""
        sizes = sorted(self.sizes.items())
        content = repr((self.part, self.model, self.algorithm, self.machine.to_json(), sizes, self.limit, self.slots, self.budget))
        text = f"{self.part} {self.model} {self.machine.devices} {self.scale} {self.algorithm}"
        return f"{re.sub(r'[^a-z0-9.]+', '-', text.lower())}-{hashlib.blake2b(content.encode(), digest_size=4).hexdigest()}"

    @property
    def minutes(self) -> float:
        """About how long a core takes for it, to say when all is done."""
        return MINUTES.get(self.algorithm, 0.05) * (2 if self.model in LARGE else 1)

    @property
    def group(self) -> tuple:
        """Cases of one group capture the same model for the same machine."""
        return self.part, self.model, self.machine.name, str(self.scale), sorted(self.sizes.items())


LARGE = ("wide_resnet_tensoropt", "inception_v3", "inception_v3_unity", "nmt", "resnet101")
MINUTES = {"unity": 0.25, "sequential": 0.2, "captured": 0.1, "flexflow": 0.6, "frontier": 0.6, "tensoropt": 0.1}
MINUTES |= {SEARCH: 2.5, PIPELINE: 0.5}
MINUTES |= dict.fromkeys(("tensoropt-frontier", "tensoropt-elimination", "mesh-frontier"), 0.3)


def on(cluster: str, devices: int) -> Machine:
    """So many devices of one of the papers' clusters, nodes filled up one after the other."""
    return next(m for m in sub_machines(Machine.preset(cluster)) if m.devices == devices)


SEARCHED = 15.0  # seconds of each of FlexFlow's chains, of which it has two; the paper's had up to 30 minutes
PROPOSALS = 1_000  # of each of its chains for a network step by step: so many whatever else the cores do
OF_ITS_OWN = {4: 2_000, 16: 500, 64: 100}  # and where its strategies need not be plans, by devices: a minute or two
RESNET, RNN, TRANSFORMER = "wide_resnet_tensoropt", "rnn_tensoropt", "transformer_tensoropt"
# What the paper does not give, chosen so that training takes about the memory on one device that its table 1 estimates: 83 GB (here
# 76) and 74 GB (74). For RNN it says 126 GB, of 108 GB of parameters: gradients are not counted there, but here, so it is 308.
AS_TABLE_1 = {RESNET: {"image": 96}, TRANSFORMER: {"seq": 40}, RNN: {}}
SINGLE = ("data-parallel", "optcnn", "tofu")
SIZES = (2048, 3072, 4096)  # hidden sizes of figure 7 (a); the paper gives none
NETWORKS = {"no RDMA": "tensoropt-v100-no-rdma", "RDMA": "tensoropt-v100", "4x RDMA": "tensoropt-v100-4x-rdma"}


def tensoropt6() -> Iterator[Case]:
    """Figure 6, frontiers of every system; table 3, seconds of the search; 16 GPUs."""
    machine = on("tensoropt-v100", 16)
    for model in (RNN, TRANSFORMER, RESNET):
        for algorithm in ("captured", "tensoropt-frontier", "mesh-frontier", "frontier", *SINGLE):
            yield Case("tensoropt6", model, algorithm, machine, AS_TABLE_1[model])
        for algorithm in ("tensoropt-elimination", IN_TENSOROPT):
            yield Case("tensoropt6", model, algorithm, machine, AS_TABLE_1[model])


def tensoropt7() -> Iterator[Case]:
    """Figure 7, the frontier of Transformer for model sizes (a), networks between machines (b) and inside of one (c)."""
    for hidden in SIZES:
        sizes = AS_TABLE_1[TRANSFORMER] | {"hidden": hidden, "heads": hidden // 128}
        yield Case("tensoropt7a", TRANSFORMER, "tensoropt-frontier", on("tensoropt-v100", 16), sizes, hidden)
    for name, cluster in NETWORKS.items():
        yield Case("tensoropt7b", TRANSFORMER, "tensoropt-frontier", on(cluster, 16), AS_TABLE_1[TRANSFORMER], name)
    nvlink = on("tensoropt-v100", 8)
    inside = nvlink.levels[-1]
    # the paper measured about a twentieth of NVLink
    slow = Level(inside.name, inside.size, inside.bandwidth / 20, LINKS["pcie3"].latency)
    pcie = replace(nvlink, name="8 GPUs on PCIe", levels=(*nvlink.levels[:-1], slow))
    for name, machine in (("NVLink", nvlink), ("PCIe", pcie)):
        yield Case("tensoropt7c", TRANSFORMER, "tensoropt-frontier", machine, AS_TABLE_1[TRANSFORMER], name)


def tensoropt8() -> Iterator[Case]:
    """Figure 8, the shortest time under a GPU's memory against the number of GPUs."""
    for model in (RESNET, TRANSFORMER):
        for devices in (4, 8, 16):
            machine = on("tensoropt-v100", devices)
            for algorithm in ("tensoropt", "captured", *SINGLE):
                limit = machine.device.memory
                yield Case("tensoropt8", model, algorithm, machine, AS_TABLE_1[model], devices, limit)


def optcnn7() -> Iterator[Case]:
    """OptCNN's figures 7 and 8 and table 5: throughput, and bytes that are sent in a step."""
    for model in ("alexnet", "vgg16", "inception_v3"):
        for devices in (1, 2, 4, 8, 16):
            for algorithm in ("data-parallel", "model-parallel", "one-weird-trick", "optcnn", "captured", "unity"):
                if devices == 1 and algorithm not in ("data-parallel", "unity"):
                    continue
                yield Case("optcnn7", model, algorithm, on("flexflow-p100", devices), {"batch": 32 * devices}, devices)
            if (model, devices) == ("vgg16", 4):
                yield Case("optcnn7", model, PUBLISHED, on("flexflow-p100", devices), {"batch": 32 * devices}, devices)


CLUSTERS = {"flexflow-p100": (4, 16), "flexflow-k80": (4, 64)}


def flexflow6() -> Iterator[Case]:
    """FlexFlow's figures 6, 7 and 9: throughput on both clusters; NMT on 64 K80; the frameworks among each other on 16 P100."""
    for cluster, every in CLUSTERS.items():
        for model in ("alexnet", "inception_v3", "resnet101", "rnntc", "rnnlm", "nmt"):
            for devices in every:
                sizes = {"batch": (256 if model == "alexnet" else 64) * devices}
                for algorithm in ("data-parallel", "expert", "flexflow", "optcnn", "unity"):
                    part, machine = f"flexflow6 {cluster.removeprefix('flexflow-')}", on(cluster, devices)
                    budget = SEARCHED if algorithm == "flexflow" else None
                    yield Case(part, model, algorithm, machine, sizes, devices, budget=budget)


def flexsteps() -> Iterator[Case]:
    """FlexFlow's recurrent networks step by step, as it searched them, judged by its simulator (`steps`); and scanned, by our
    search. On 4 devices also what `search="flexflow"` does: those of its strategies that are plans."""
    for cluster, every in CLUSTERS.items():
        for devices, model in product(every, ("rnntc", "rnnlm", "nmt")):
            machine, part, sizes = on(cluster, devices), f"flexsteps {cluster.removeprefix('flexflow-')}", {"batch": 64 * devices}
            if devices == 4:
                yield Case(part, f"{model}_unrolled", "data-parallel", machine, sizes, devices)
                yield Case(part, f"{model}_unrolled", "flexflow", machine, sizes, devices, budget=PROPOSALS)
            for algorithm in BY_HAND:
                yield Case(part, f"{model}_unrolled", algorithm, machine, sizes, devices)
            yield Case(part, f"{model}_unrolled", SEARCH, machine, sizes, devices, budget=OF_ITS_OWN[devices])
            for algorithm in ("data-parallel", "captured"):
                yield Case(part, model, algorithm, machine, sizes, devices)


UNITY = ("resnext50_unity", "bert_large", "dlrm_summit", "candle_uno", "inception_v3_unity", "mlp_unity", "xdl")


def unity14() -> Iterator[Case]:
    """Unity's figures 14 and 15: throughput on Summit; joint against sequential optimization."""
    for devices in (6, 96):
        machine = on("summit", devices)
        for model in UNITY:
            sizes = {"batch": BATCH[model] * devices}
            best = {"bert_large": ("megatron",), "dlrm_summit": ("expert",), "candle_uno": ("expert",)}.get(model, ())
            for algorithm in ("data-parallel", *best, "flexflow", "sequential", "unity-rules", "captured", "unity"):
                budget = SEARCHED if algorithm == "flexflow" else None
                yield Case("unity14", model, algorithm, machine, sizes, devices, budget=budget)


def unity15() -> Iterator[Case]:
    """Unity's figure 15 (a): BERT-Large with more and more dimensions that may be split."""
    machine = on("summit", 96)
    for algorithm in (*ABLATION, PIPELINE, "captured"):
        yield Case("unity15", "bert_large", algorithm, machine, {"batch": BATCH["bert_large"] * 96}, 96)


PARTS = {"tensoropt6": tensoropt6, "tensoropt7": tensoropt7, "tensoropt8": tensoropt8}
PARTS |= {"optcnn7": optcnn7, "flexflow6": flexflow6, "flexsteps": flexsteps, "unity14": unity14, "unity15": unity15}


def cases(parts: tuple[str, ...]) -> list[Case]:
    """All cases of some parts."""
    return [case for part in parts for case in PARTS[part]()]


def groups(every: list[Case]) -> list[list[Case]]:
    """Cases that share a captured model, together."""
    return [list(some) for _, some in groupby(every, key=lambda case: case.group)]
