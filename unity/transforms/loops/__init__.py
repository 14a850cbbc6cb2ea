"""Rules of loops: which values of a scan's step are computed before it, the choice among the rules, and the transformation."""

from unity.transforms.loops.choose import best
from unity.transforms.loops.dependences import scans
from unity.transforms.loops.loop_rewriting import LoopApplication, LoopRewriting, LoopRewritingRecord, applicable, loop_rewriting

__all__ = ["LoopApplication", "LoopRewriting", "LoopRewritingRecord", "applicable", "best", "loop_rewriting", "scans"]
