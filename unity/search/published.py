"""Published algorithms and strategies by hand, by name. One is imported when it is asked for: what users plan with needs none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TypeAlias

from unity.search.session import Candidate, Search

# Where each is: a module of `unity.baselines`, and a function in it.
_PLACES: dict[str, tuple[str, str]] = {
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
    """What is asked of an algorithm: bytes that a device has, what random numbers begin with, and how long to look (a number of
    steps, or seconds as a float; None: as published)."""

    limit: float
    seed: int = 0
    budget: float | None = None


# The strategy may need more than the limit: then the algorithm found none that fits.
Algorithm: TypeAlias = Callable[[Search, Asked], Candidate]


def names() -> tuple[str, ...]:
    """The names of all algorithms, as `unity.optimize(search=NAME)` takes them."""
    return tuple(_PLACES)


def algorithm(name: str) -> Algorithm:
    """The algorithm of a name. Raises KeyError if there is none."""
    module, function = _PLACES[name]
    return getattr(import_module(f"unity.baselines.{module}"), function)
