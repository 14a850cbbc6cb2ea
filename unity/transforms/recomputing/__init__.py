"""Recomputation of layers in the backward pass: the layers of a program, the choice among them, and the rewrite."""

from unity.transforms.recomputing.choose import (
    LayeredProgram,
    RecomputingChoice,
    RecomputingWish,
    best,
    best_steps_of_scans,
    of_all_layers,
)
from unity.transforms.recomputing.recomputing import Recomputing, RecomputingRecord, recomputing

__all__ = [
    "LayeredProgram",
    "Recomputing",
    "RecomputingChoice",
    "RecomputingRecord",
    "RecomputingWish",
    "best",
    "best_steps_of_scans",
    "of_all_layers",
    "recomputing",
]
