"""A difference as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

from unity.diff.document import Document, DocumentRow, DocumentTable


def markdown(document: Document) -> str:
    """Return a document as Markdown headings and tables."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Document) -> Iterator[str]:
    yield f"# {escaped(document.title)}"
    for table in document.tables:
        yield from ("", f"## {escaped(table.title)}", "")
        yield from _table(table)


def _table(table: DocumentTable) -> Iterator[str]:
    yield _row(DocumentRow("", table.columns))
    yield "|" + " --- |" * (len(table.columns) + 1)
    yield from map(_row, table.rows)


def _row(row: DocumentRow) -> str:
    cells = [escaped(cell.strip()) for cell in row.cells]
    if row.heading:
        cells = [f"**{cell}**" if cell else "" for cell in cells]
    return "| " + " | ".join((f"`{row.mark}`" if row.mark.strip() else "", *cells)) + " |"


def escaped(text: str) -> str:
    """Return text with Markdown's special characters escaped, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text.replace("\n", " "))
