"""A difference as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

from unity.diff.document import Document, Row, Table


def markdown(found: Document) -> str:
    """A document as headings and tables."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Document) -> Iterator[str]:
    yield f"# {escaped(found.title)}"
    for table in found.tables:
        yield from ("", f"## {escaped(table.title)}", "")
        yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    yield _row(Row("", table.columns))
    yield "|" + " --- |" * (len(table.columns) + 1)
    yield from map(_row, table.rows)


def _row(row: Row) -> str:
    cells = [escaped(cell.strip()) for cell in row.cells]
    if row.heading:
        cells = [f"**{cell}**" if cell else "" for cell in cells]
    return "| " + " | ".join((f"`{row.mark}`" if row.mark.strip() else "", *cells)) + " |"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: what would be a column, a link, a tag or emphasis is none."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text.replace("\n", " "))
