"""Plans compared: what is different between two programs as they run, in words, tables, pictures and data."""

from unity.diff.compare import FORMATS, PlanDiff

__all__ = ["FORMATS", "PlanDiff"]
