"""Pipelines for a captured program: which of its scans can be one, with which stages, and what that makes of the program."""

from unity.pipelining.choose import PipelineWish, best
from unity.pipelining.micro import scans
from unity.pipelining.pipelining import Pipelining, Program, from_json, pipelined

__all__ = ["PipelineWish", "Pipelining", "Program", "best", "from_json", "pipelined", "scans"]
