"""Pipelines for a captured program: which of its scans can be one, with which stages, and what that makes of the program."""

from unity.transforms.pipelining.choose import PipelineWish, best
from unity.transforms.pipelining.kept import from_json
from unity.transforms.pipelining.micro import scans
from unity.transforms.pipelining.pipelining import Pipelining, Program, pipelined
from unity.transforms.pipelining.unlike import best_unlike

__all__ = ["PipelineWish", "Pipelining", "Program", "best", "best_unlike", "from_json", "pipelined", "scans"]
