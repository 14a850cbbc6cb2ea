"""Branches of a captured program on devices of their own: where there are any, how they are shared out, what that makes of it."""

from unity.transforms.branches.branching import Branching, Forked, Share, branched, from_json
from unity.transforms.branches.choose import BranchesWish, best, dealt

__all__ = ["BranchesWish", "Branching", "Forked", "Share", "best", "branched", "dealt", "from_json"]
