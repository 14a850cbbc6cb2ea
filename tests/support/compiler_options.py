"""The options with which XLA compiles programs whose values tests compare."""

from importlib.metadata import version
from typing import Any

# XLA fuses products with what is before them into YNNPACK kernels, some of which compute something else, in plain JAX too
# (docs/numerics.md shows one). A compiler without this flag would refuse it.
EXACT: dict[str, Any] = (
    {"xla_cpu_experimental_ynn_fusion_type": ""} if version("jaxlib").startswith(("0.10.", "0.11.", "0.12.")) else {}
)
# XLA without these kernels refuses some products of bfloat16, as those of attention ("Dot with multiple contracting dimensions is
# not implemented"): their tests compile with `QUICK_FUSED`.
QUICK_FUSED: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
QUICK: dict[str, Any] = {**QUICK_FUSED, **EXACT}
