"""Pipelines for a captured program: the scans and chains that can be one, the choice of stages, and the rewrite."""

from unity.transforms.pipelining.choose import PipelineWish, best
from unity.transforms.pipelining.kept import from_json
from unity.transforms.pipelining.micro import scans
from unity.transforms.pipelining.pipelining import PipelineSource, Pipelining, pipelined
from unity.transforms.pipelining.unlike import best_unlike

__all__ = ["PipelineSource", "PipelineWish", "Pipelining", "best", "best_unlike", "from_json", "pipelined", "scans"]
