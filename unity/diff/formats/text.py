"""A difference as text: in colour on a terminal, plain in a pipe."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unity.diff.document import Document, DocumentRow, DocumentTable

STYLES = {"+": "green", "-": "red", "~": "yellow"}
PIPE_WIDTH = 10_000  # characters: wide enough that nothing is cut


def show(document: Document, file: Any = None) -> None:
    """Print a document. On a terminal, long lines are wrapped."""
    console = Console(file=file, markup=False, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    _print(document, console)


def plain(document: Document) -> str:
    """Return a document as text without colours."""
    file = io.StringIO()
    _print(document, Console(file=file, markup=False, highlight=False, width=PIPE_WIDTH, force_terminal=False, no_color=True))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _print(document: Document, console: Console) -> None:
    console.print(Text(document.title, style="bold"))
    for table in document.tables:
        console.print()
        console.print(Text(table.title, style="bold"))
        for part in _parts(table):
            console.print(part)


def _parts(table: DocumentTable) -> Iterator[Text | Table]:
    """Yield a table as one grid or, if it has headings, each heading as a line followed by a grid of its rows."""
    if not any(row.heading for row in table.rows):
        yield _grid(table.columns, table.rows, ())
        return
    body = [row.cells for row in table.rows if not row.heading]
    widths = [max(map(len, cells)) for cells in zip(*body, strict=True)]
    rows: list[DocumentRow] = []
    for row in (*table.rows, None):
        if row is None or row.heading:
            yield from (_grid((), rows, widths),) if rows else ()
            rows = []
        if row is not None and row.heading:
            costs = [f"{name} {cell}" for name, cell in zip(table.columns[1:], row.cells[1:], strict=True) if cell]
            yield Text.assemble((row.cells[0], "bold"), f"   {', '.join(costs)}" if costs else "")
        elif row is not None:
            rows.append(row)


def _grid(columns: Sequence[str], rows: Sequence[DocumentRow], widths: Sequence[int]) -> Table:
    """Return rows as a grid.

    Args:
        columns: the column headings, if any.
        rows: the rows.
        widths: the least widths of the columns, which align the grids of one table; empty for a table that is one grid.
    """
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns))
    names = ("", *(columns or ("",) * len(rows[0].cells)))
    for name, width in zip(names, (1, *(widths or (0,) * len(names))), strict=False):
        grid.add_column(name, header_style="dim", overflow="fold", min_width=width)
    for row in rows:
        mark = f"  {row.mark}" if widths else row.mark
        grid.add_row(*(Text(cell, style=STYLES.get(row.mark, "")) for cell in (mark, *row.cells)))
    return grid
