"""Reports: a plan as one HTML page, to be looked at and sent around; and what a notebook shows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unity.base import atomic_files as atomic
from unity.report.content import Source, content, of_file, of_plan
from unity.report.page import page

__all__ = ["Source", "content", "of_file", "of_plan", "page", "save"]


def save(found: dict[str, Any], path: str | Path) -> None:
    """Writes a document's page; an old file is replaced as a whole, or not at all. Raises PlanError if it cannot be written."""
    atomic.save(path, page(found))
