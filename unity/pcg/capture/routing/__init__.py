"""Mixtures of experts whose tokens are sorted by expert, as products of rows that each have a label."""

from unity.pcg.capture.routing.sorted_rows import without_sorting

__all__ = ["without_sorting"]
