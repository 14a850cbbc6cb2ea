"""Reports: a plan as one HTML page, to be looked at and sent around; and what a notebook shows of it."""

from __future__ import annotations

from pathlib import Path

from unity.pcg.atomic import write
from unity.pcg.errors import PlanError
from unity.report.content import Source, content, of_file, of_plan
from unity.report.page import page

__all__ = ["Source", "content", "of_file", "of_plan", "page", "save"]


def save(source: Source, path: str | Path) -> None:
    """Writes a report; an old file is replaced as a whole, or not at all. Raises PlanError if it cannot be written."""
    text = page(content(source))
    try:
        write(path, text)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}") from error
