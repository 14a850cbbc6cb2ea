"""Reports: a plan as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unity.base import atomic_files as atomic
from unity.report.content import Source, content, of_file, of_plan
from unity.report.page import page

__all__ = ["Source", "content", "of_file", "of_plan", "page", "save"]


def save(report: dict[str, Any], path: str | Path) -> None:
    """Write a report as a page. An existing file is replaced as a whole or not at all.

    Raises:
        PlanError: the file cannot be written.
    """
    atomic.save(path, page(report))
