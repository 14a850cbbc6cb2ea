"""Differences of two graphs, and of two plans: in words, tables, pictures and data."""

from unity.diff.graph_diff import AddedNode, ChangedNode, GraphDiff, GraphHeader, Reference, RemovedNode, apply, diff
from unity.diff.plan_diff import FORMATS, PlanDiff
from unity.diff.program_difference import FirstDifference, first_difference

__all__ = [
    "FORMATS",
    "AddedNode",
    "ChangedNode",
    "FirstDifference",
    "GraphDiff",
    "GraphHeader",
    "PlanDiff",
    "Reference",
    "RemovedNode",
    "apply",
    "diff",
    "first_difference",
]
