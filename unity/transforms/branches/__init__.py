"""Branches of a captured program on separate groups of devices: their detection, their assignment to groups, and the rewrite."""

from unity.transforms.branches.branching import Branching, BranchingRecord, Forked, Share, branched
from unity.transforms.branches.choose import BranchesWish, best, dealt

__all__ = ["BranchesWish", "Branching", "BranchingRecord", "Forked", "Share", "best", "branched", "dealt"]
