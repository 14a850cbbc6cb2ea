"""A difference in a file: the name says in which format."""

from __future__ import annotations

import json
from pathlib import Path

from unity.base import atomic_files as atomic
from unity.base.errors import PlanError
from unity.diff.compare import PlanDiff

ENDINGS = {".txt": "text", ".md": "markdown", ".json": "json", ".dot": "dot", ".html": "html"}


def save(found: PlanDiff, path: str | Path, form: str | None = None) -> None:
    """Writes a difference; an old file is replaced as a whole, or not at all. Raises PlanError where the name says no format."""
    form = form or ENDINGS.get(Path(path).suffix)
    if form is None:
        raise PlanError(f"{path}: a diff is saved as one of {', '.join(ENDINGS)}; end the file's name so, or say the format")
    atomic.save(path, formatted(found, form))


def formatted(found: PlanDiff, form: str) -> str:
    """A difference in a format, as the text of a file."""
    text = {"text": found.text, "markdown": found.markdown, "dot": found.dot, "html": found.html}
    shown = text[form]() if form in text else json.dumps(found.to_json(), indent=1)
    return shown if shown.endswith("\n") else shown + "\n"
