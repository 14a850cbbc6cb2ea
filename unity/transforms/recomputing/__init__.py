"""Recomputation of layers in the backward pass: the layers of a program, the choice among them, and the rewrite."""

from unity.transforms.recomputing.choose import LayeredProgram, RecomputingChoice, RecomputingWish, best, of_all_layers, of_scans
from unity.transforms.recomputing.recomputing import Recomputing, RecomputingRecord, recomputing

__all__ = [
    "LayeredProgram",
    "Recomputing",
    "RecomputingChoice",
    "RecomputingRecord",
    "RecomputingWish",
    "best",
    "of_all_layers",
    "of_scans",
    "recomputing",
]
