"""Pipelines for a captured program: which of its scans can be one, with which stages, and what that makes of the program."""

from unity.pipelining.choose import PipelineWish, best
from unity.pipelining.kept import from_json
from unity.pipelining.micro import scans
from unity.pipelining.pipelining import Pipelining, Program, pipelined
from unity.pipelining.unlike import best_unlike

__all__ = ["PipelineWish", "Pipelining", "Program", "best", "best_unlike", "from_json", "pipelined", "scans"]
