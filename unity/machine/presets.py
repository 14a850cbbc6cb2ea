"""Known devices, links and clusters, as data. Every figure carries its source.

Rates are the vendors' peaks for dense operands (without structured sparsity). Memory is what the board carries; what is
left for a program is less (`Machine.with_memory`). Users with better figures describe their machine in a JSON file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from unity.machine.hardware import Device, Level, Protocol

_GIB = 2**30

# Part of the peak that a large matrix product reaches. V100: 83 of 112.7 TFLOP/s (Markidis et al., NVIDIA Tensor Core
# Programmability, Performance & Precision, IPDPSW 2018). A100: 271.2 of 312, H100: 792.1 of 989 (Bekman, Machine
# Learning Engineering Open Book, "Maximum Achievable Matmul FLOPS"). H200: taken from the H100, whose processor it has.
# K80, P100: assumed.
_REACHED = {"k80": 0.8, "p100": 0.8, "v100": 0.74, "a100": 0.87, "h100": 0.80, "h200": 0.80}

# Seconds of overhead per operator of a compiled program. Assumed: no vendor states it.
_LAUNCH = 4e-6

# Data sheet "Tesla V100", SXM2: 7.8 / 15.7 / 125 TFLOP/s in FP64 / FP32 / tensor (FP16), 900 GB/s, 16 or 32 GB. No
# bfloat16 units.
_V100 = {"float64": 7.8e12, "float32": 15.7e12, "float16": 125e12}
# Data sheet "A100 Tensor Core GPU", SXM: FP64 tensor 19.5, TF32 156, BF16 and FP16 312, INT8 624 T(FL)OP/s.
# float32 is the TF32 rate: JAX's default precision uses tensorfloat32 where there is any (docstring of
# jax.lax.Precision).
_A100 = {"float64": 19.5e12, "float32": 156e12, "bfloat16": 312e12, "float16": 312e12, "int8": 624e12}
# Data sheets "H100" and "H200", SXM: FP64 tensor 67, TF32 494.7, BF16 and FP16 989.4, FP8 and INT8 1978.9
# T(FL)OP/s dense (the sheets print twice that, with sparsity). float32 is the TF32 rate, as above.
_HOPPER = {
    "float64": 67e12,
    "float32": 494.7e12,
    "bfloat16": 989.4e12,
    "float16": 989.4e12,
    "float8_e4m3fn": 1978.9e12,
    "float8_e5m2": 1978.9e12,
    "int8": 1978.9e12,
}

# How many times as long products take whose rows are not multiples of 16 bytes. H200: seven in bfloat16 and float32, forward or
# backward, 1.4 to 4.0 times as long as their aligned neighbours, 2.4 in the median (`python -m benchmarks.gpu_kernels`). H100: its
# processor is the same. Others: not measured.
_MISALIGNED = {"h100": 2.4, "h200": 2.4}


def _gpu(name: str, flops: Mapping[str, float], gib: int, bandwidth: float) -> Device:
    kind = name.split("-")[0]
    return Device(name, flops, gib * _GIB, bandwidth, _REACHED[kind], _LAUNCH, _MISALIGNED.get(kind, 1.0))


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        # Data sheet "Tesla K80", one of the board's two GPUs, boost clocks: half of 2.91 / 8.74 TFLOP/s in FP64 /
        # FP32, of 480 GB/s and of 24 GB.
        _gpu("k80", {"float64": 1.455e12, "float32": 4.37e12}, 12, 240e9),
        # Data sheet "Tesla P100", NVLink version: 5.3 / 10.6 / 21.2 TFLOP/s in FP64 / FP32 / FP16, 732 GB/s, 16 GB.
        _gpu("p100", {"float64": 5.3e12, "float32": 10.6e12, "float16": 21.2e12}, 16, 732e9),
        _gpu("v100", _V100, 16, 900e9),
        _gpu("v100-32gb", _V100, 32, 900e9),
        # Same data sheet: 1,555 GB/s with 40 GB, 2,039 GB/s with 80 GB.
        _gpu("a100-40gb", _A100, 40, 1555e9),
        _gpu("a100", _A100, 80, 2039e9),
        # Same data sheets: 3.35 TB/s with 80 GB, 4.8 TB/s with 141 GB.
        _gpu("h100", _HOPPER, 80, 3.35e12),
        _gpu("h200", _HOPPER, 141, 4.8e12),
    )
}

# `Device.device_kind` as JAX gives it, for the boards above and no others (a PCIe board has other clocks and links; it
# is measured instead).
KINDS: Mapping[str, str] = {
    "Tesla K80": "k80",
    "Tesla P100-SXM2-16GB": "p100",
    "Tesla V100-SXM2-16GB": "v100",
    "Tesla V100-SXM2-32GB": "v100-32gb",
    "Tesla V100-SXM3-32GB": "v100-32gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
}


@dataclass(frozen=True)
class Link:
    """A port or network card: bytes/s in one direction, seconds per message, and the protocols of collectives over it."""

    bandwidth: float
    latency: float
    protocols: tuple[Protocol, ...] = ()


# NCCL's own model of its protocols, src/graph/tuning.cc (baseLatencies, hwLatencies, llMaxBws; of trees, bytes at 0.92 of the
# bandwidth, and of that 1/3.8 by LL and 120/128 by LL128; each step of a ring between nodes takes at least what posting it to the
# network takes, here on Intel's processors). Left out are its corrections for trees of medium sizes and for large all-reduces in
# rings between nodes, and that LL is faster between two nodes than between many. Devices before the V100 have no LL128.
# The latency of messages is a ring's step by LL128. For 4 KB among 16 H100s on two nodes NCCL's log says 25.9 µs by a tree and LL,
# and 25.4 come out here; of 4 bytes to 4 KB among 8 H20s, 12.5 to 16.7 were measured, and 15.0 come out
# (github.com/NVIDIA/nccl/issues/1453, github.com/deepseek-ai/DeepEP/issues/303).
# NVLS, by which the switches of H100s add up, is left out.
_NVLINK_STEP, _PCIE_STEP, _NETWORK_STEP = 1.9e-6, 2.5e-6, 4.0e-6
_LL, _LL128, _SIMPLE = 6.6e-6, 14e-6, 8.4e-6  # seconds before the first step


def _nvlink(low_latency: float) -> tuple[Protocol, Protocol, Protocol]:
    """Return the protocols over NVLink. `low_latency`: the bytes/s that LL reaches inside of a node."""
    return (
        Protocol("LL", _LL, 0.6e-6, share=0.5, most=low_latency),
        Protocol("LL128", _LL128, _NVLINK_STEP, share=0.92),
        Protocol("Simple", _SIMPLE, 3.4e-6),
    )


_PCIE = (Protocol("LL", _LL, 1.0e-6, share=0.5), Protocol("Simple", _SIMPLE, 5.7e-6))
# LL between more than two nodes: 19 (AMD) or 20.4 GB/s (Intel).
_NETWORK = (
    Protocol("LL", _LL, 2.7e-6, share=0.5, most=20e9, least_step=1e-6, tree_step=5.0e-6, tree_share=0.92 / 3.8),
    Protocol("LL128", _LL128, _NETWORK_STEP, share=0.92, least_step=1e-6, tree_step=8.5e-6, tree_share=0.92 * 120 / 128),
    Protocol("Simple", _SIMPLE, 14e-6, least_step=3e-6, tree_step=14e-6, tree_share=0.92),
)
_VOLTA, _AMPERE, _HOPPER_NVLINK = _nvlink(39e9), _nvlink(87.7e9), _nvlink(141e9)

LINKS: Mapping[str, Link] = {
    # All NVLinks of one GPU together: P100 4 x 20 GB/s, V100 6 x 25, A100 12 x 25, H100 and H200 18 x 25 (data sheets;
    # they print the sum of both directions).
    "nvlink1": Link(80e9, _NVLINK_STEP, (_VOLTA[0], _VOLTA[2])),
    "nvlink2": Link(150e9, _NVLINK_STEP, _VOLTA),
    "nvlink3": Link(300e9, _NVLINK_STEP, _AMPERE),
    "nvlink4": Link(450e9, _NVLINK_STEP, _HOPPER_NVLINK),
    # 16 lanes of 8, 16 or 32 GT/s, 128b/130b coding (PCI-SIG base specifications 3.0, 4.0, 5.0). Copies between an H200 and
    # pinned memory of its host reach 53 GB/s of the last (`python -m benchmarks.gpu_kernels copies`).
    "pcie3": Link(15.75e9, _PCIE_STEP, _PCIE),
    "pcie4": Link(31.5e9, _PCIE_STEP, _PCIE),
    "pcie5": Link(63.0e9, _PCIE_STEP, _PCIE),
    # From a Grace CPU to its Hopper GPU: 900 GB/s in both directions together (data sheet "GH200 Grace Hopper Superchip"). No
    # published latency; taken as an NVLink step.
    "nvlink-c2c": Link(450e9, _NVLINK_STEP),
    # Between the two POWER9 of a node: 4 bytes at 16 GT/s (OLCF, Summit User Guide: X-Bus 64 GB/s). No published
    # latency; taken as a PCIe step.
    "xbus": Link(64e9, _PCIE_STEP),
    # One 4x port: 56.25 Gb/s signalled with 64b/66b coding for FDR, 100, 200, 400 Gb/s of data (InfiniBand Trade
    # Association roadmap).
    "ib-fdr": Link(6.82e9, _NETWORK_STEP, (_NETWORK[0], _NETWORK[2])),
    "ib-edr": Link(12.5e9, _NETWORK_STEP, _NETWORK),
    "ib-hdr": Link(25e9, _NETWORK_STEP, _NETWORK),
    "ib-ndr": Link(50e9, _NETWORK_STEP, _NETWORK),
}


@dataclass(frozen=True)
class Links:
    """The usual links of nodes with one kind of device: inside a node, between nodes, and whether each device has a network
    card or all share one; and the link from each device to its host's memory."""

    intra: str
    inter: str
    card_per_device: bool
    host: str


# DGX A100 and DGX H100/H200 system user guides: one ConnectX card for each GPU in the compute fabric. The older ones as
# in the papers' clusters below. To the host: 16 lanes of the generation in the device's data sheet, for each device alone; where
# two devices share the uplink of a PCIe switch, each has half of that when both use it.
USUAL_LINKS: Mapping[str, Links] = {
    "k80": Links("pcie3", "ib-fdr", False, "pcie3"),
    "p100": Links("nvlink1", "ib-edr", False, "pcie3"),
    "v100": Links("nvlink2", "ib-edr", False, "pcie3"),
    "v100-32gb": Links("nvlink2", "ib-edr", False, "pcie3"),
    "a100-40gb": Links("nvlink3", "ib-hdr", True, "pcie4"),
    "a100": Links("nvlink3", "ib-hdr", True, "pcie4"),
    "h100": Links("nvlink4", "ib-ndr", True, "pcie5"),
    "h200": Links("nvlink4", "ib-ndr", True, "pcie5"),
}


@dataclass(frozen=True)
class Cluster:
    """A cluster: its device, its usual number of nodes, the level between nodes (of any size), the levels inside, and the link to
    the host, if it is not the usual one of the device."""

    device: str
    nodes: int
    between: Level
    inside: tuple[Level, ...]
    host: Link | None = None


def _node(bandwidth: float) -> Level:
    return Level("node", 1, bandwidth, _NETWORK_STEP)


def _port(devices: int, link: str) -> Level:
    return Level("device", devices, LINKS[link].bandwidth, LINKS[link].latency)


def _dgx(device: str) -> Cluster:
    links = USUAL_LINKS[device]
    port, card = replace(_port(8, links.intra), protocols=LINKS[links.intra].protocols), _node(LINKS[links.inter].bandwidth)
    return Cluster(device, 1, replace(card, protocols=LINKS[links.inter].protocols), (port,))


_EDR, _FDR = LINKS["ib-edr"].bandwidth, LINKS["ib-fdr"].bandwidth

# Those of papers have no protocols: the systems in the papers count steps of rings, or no latency.
CLUSTERS: Mapping[str, Cluster] = {
    # Unity, section 7: Summit, 32 nodes of 6 V100, three GPUs per CPU joined by NVLink, EDR 100 Gb/s. The Summit User
    # Guide (OLCF) adds: two EDR rails per node, which 6 devices share; an X-Bus of 64 GB/s between the CPUs, which the
    # 3 devices of a socket share; two NVLink bricks of 25 GB/s between each two GPUs of a socket, so 4 per GPU.
    "summit": Cluster(
        "v100",
        32,
        _node(2 * _EDR / 6),
        (
            Level("socket", 2, LINKS["xbus"].bandwidth / 3, LINKS["xbus"].latency),
            Level("device", 3, 4 * 25e9, _NVLINK_STEP),
        ),
        # Two more NVLink bricks of 25 GB/s join each GPU with the CPU of its socket (same guide).
        Link(2 * 25e9, _NVLINK_STEP),
    ),
    # OptCNN, section 6, and FlexFlow, section 8.1: 4 nodes of 4 P100, NVLink inside, EDR 100 Gb/s (the paper's "GB/s"
    # is a slip) between, one card shared by 4.
    "flexflow-p100": Cluster("p100", 4, _node(_EDR / 4), (_port(4, "nvlink1"),)),
    # FlexFlow, section 8.1 and figure 5: 16 nodes of 4 K80; pairs on a PCIe switch of their own, whose one uplink to
    # the shared switch 2 devices share; 56 Gb/s InfiniBand, shared by 4.
    "flexflow-k80": Cluster(
        "k80",
        16,
        _node(_FDR / 4),
        (
            Level("pair", 2, LINKS["pcie3"].bandwidth / 2, _PCIE_STEP),
            _port(2, "pcie3"),
        ),
    ),
    # TensorOpt, section 5: 2 machines of 8 V100 (16 GB), NVLink inside, RDMA over EDR 100 Gb/s between, shared by 8.
    "tensoropt-v100": Cluster("v100", 2, _node(_EDR / 8), (_port(8, "nvlink2"),)),
    # TensorOpt, section 5.1, figure 7 (b): without RDMA about half of that; with a DGX's four cards four times.
    "tensoropt-v100-no-rdma": Cluster("v100", 2, _node(0.5 * _EDR / 8), (_port(8, "nvlink2"),)),
    "tensoropt-v100-4x-rdma": Cluster("v100", 2, _node(4 * _EDR / 8), (_port(8, "nvlink2"),)),
    "dgx-a100": _dgx("a100"),
    "dgx-h100": _dgx("h100"),
    "dgx-h200": _dgx("h200"),
}
