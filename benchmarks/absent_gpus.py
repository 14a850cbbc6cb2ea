"""Eight H200s that need not be there, for which XLA compiles programs, and networks to compile for them.

`pip install 'jax[cuda13]'`. Set `XLA_FLAGS`, and `JAX_PLATFORMS` for the devices of the process, before JAX is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from benchmarks import fidelity, memory
from benchmarks.models import registry
from benchmarks.models.bert import bert
from benchmarks.models.gpt import gpt
from benchmarks.models.model import Model
from benchmarks.models.resnet import resnet
from benchmarks.models.unet import unet

DEVICES = 8
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  device_memory_size: 150000000000
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""

LOOPED: dict[str, Any] = {"scan": True, "remat": True}
USED: dict[str, Callable[[], Model]] = {  # planned as captured
    "vit_large, 2 layers": lambda: registry.get("vit_large", layers=2),
    "t5_large, 2 and 2 layers": lambda: registry.get("t5_large", layers=2),
    "llama3_8b, 2 layers, scan and remat": lambda: registry.get("llama3_8b", layers=2, batch=16, **LOOPED),
    "mixtral_8x7b, 2 layers, scan and remat": lambda: registry.get("mixtral_8x7b", layers=2, batch=16, **LOOPED),
    "mamba2_1.3b, 2 layers, scan and remat": lambda: registry.get("mamba2_1.3b", layers=2, **LOOPED),
    "dit_xl, 2 layers": lambda: registry.get("dit_xl", layers=2),
    "unet_cifar": lambda: registry.get("unet_cifar"),
    "unet, Stable Diffusion's widths": lambda: unet(
        width=320, growth=(1, 2, 4, 4), attended=(32, 16), image=64, channels=4, batch=32
    ),
    "inception_v3": lambda: registry.get("inception_v3", batch=256),
    "vgg16, full size": lambda: registry.get("vgg16", batch=256),
    "alexnet, full size": lambda: registry.get("alexnet", batch=1024),
    "squeezenet": lambda: registry.get("squeezenet", batch=512),
    "resnext50": lambda: registry.get("resnext50", batch=256),
    "rnnlm": lambda: registry.get("rnnlm"),
    "nmt, full size": lambda: registry.get("nmt"),
    "dlrm_summit": lambda: registry.get("dlrm_summit"),
    "dlrm_kaggle": lambda: registry.get("dlrm_kaggle", batch=2048),
    "xdl, full size": lambda: registry.get("xdl", batch=1024),
    "candle_uno": lambda: registry.get("candle_uno", batch=1024),
    "mlp_unity": lambda: registry.get("mlp_unity", batch=1024),
}
CASES: dict[str, Callable[[], Model]] = {
    **{f"{name}, tiny": case.model for name, case in fidelity.CASES.items() if case.machine.devices == DEVICES},
    **{name: case.model for name, case in memory.CASES.items()},
    "gpt2, 2 layers": lambda: gpt(layers=2, batch=64),
    "gpt2, 2 layers, bfloat16": lambda: gpt(layers=2, batch=64, compute="bfloat16"),
    "bert_large, 2 layers": lambda: bert(layers=2, batch=64),
    "resnet50": lambda: resnet(batch=256),
    **USED,
}


def described(count: int) -> Sequence[Any]:
    """So many H200s of one node, as XLA compiles for them."""
    jax.devices()  # finds the plugins that are installed
    shape = f"1x1x{count}"
    return topologies.get_topology_desc(platform="cuda", topology_name=shape, topology=shape, target_config=H200).devices
