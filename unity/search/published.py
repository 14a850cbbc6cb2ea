"""Registry of the published algorithms and the strategies by hand, each imported on first use: planning itself needs none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TypeAlias

from unity.search.session import Candidate, Search

# The module of `unity.baselines` and the function in it that implement each algorithm.
_LOCATIONS: dict[str, tuple[str, str]] = {
    "optcnn": ("optcnn", "optcnn"),
    "flexflow": ("flexflow.mesh", "flexflow"),
    "tensoropt": ("tensoropt", "mini_time"),
    "data-parallel": ("by_hand", "data_parallel"),
    "fsdp": ("by_hand", "fsdp"),
    "model-parallel": ("by_hand", "model_parallel"),
    "one-weird-trick": ("by_hand", "one_weird_trick"),
    "megatron": ("by_hand", "megatron"),
    "expert": ("by_hand", "expert"),
    "tofu": ("tofu", "tofu"),
    "mesh-tensorflow": ("tofu", "mesh_tensorflow"),
}


@dataclass(frozen=True)
class Asked:
    """The arguments of a published algorithm.

    Args:
        limit: Bytes of memory of one device.
        seed: Seed of the random numbers.
        budget: Length of the search: an int counts steps, a float seconds; None is the published length.
    """

    limit: float
    seed: int = 0
    budget: float | None = None


# A returned strategy that needs more memory than the limit means that the algorithm found none that fits.
Algorithm: TypeAlias = Callable[[Search, Asked], Candidate]


def names() -> tuple[str, ...]:
    """Return the names of all algorithms, as `unity.optimize(search=NAME)` takes them."""
    return tuple(_LOCATIONS)


def algorithm(name: str) -> Algorithm:
    """Return the algorithm of a name.

    Raises:
        KeyError: The name is unknown.
    """
    module, function = _LOCATIONS[name]
    return getattr(import_module(f"unity.baselines.{module}"), function)
