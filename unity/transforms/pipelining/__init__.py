"""Pipelines for a captured program: the scans and chains that can be one, the choice of stages, and the rewrite."""

from unity.transforms.pipelining.choose import PipelineCandidate, PipelineWish, best
from unity.transforms.pipelining.micro_batches import scans
from unity.transforms.pipelining.pipelining import AlikeRecord, PipelineSource, Pipelining, pipelined
from unity.transforms.pipelining.unlike.pipelining import UnlikeRecord, best_unlike

__all__ = [
    "AlikeRecord",
    "PipelineCandidate",
    "PipelineSource",
    "PipelineWish",
    "Pipelining",
    "UnlikeRecord",
    "best",
    "best_unlike",
    "pipelined",
    "scans",
]
