"""A difference as text: in colour in a terminal, plain in a pipe."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from unity.diff.document import Document, Row, Table

STYLES = {"+": "green", "-": "red", "~": "yellow"}
WIDEST = 10_000  # of lines in a pipe: nothing is cut


def show(found: Document, file: Any = None) -> None:
    """Prints a document. What does not fit into a terminal's line goes on in the next."""
    console = Console(file=file, markup=False, highlight=False)
    if not console.is_terminal:
        console.width = WIDEST
    _print(found, console)


def plain(found: Document) -> str:
    """A document without colours."""
    file = io.StringIO()
    _print(found, Console(file=file, markup=False, highlight=False, width=WIDEST, force_terminal=False, no_color=True))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _print(found: Document, console: Console) -> None:
    console.print(Text(found.title, style="bold"))
    for table in found.tables:
        console.print()
        console.print(Text(table.title, style="bold"))
        for part in _parts(table):
            console.print(part)


def _parts(table: Table) -> Iterator[Text | Grid]:
    """A table as it is; or, where it has headings, each as a line of its own with the rows that follow it below."""
    if not any(row.heading for row in table.rows):
        yield _grid(table.columns, table.rows, ())
        return
    body = [row.cells for row in table.rows if not row.heading]
    widths = [max(map(len, cells)) for cells in zip(*body, strict=True)]
    rows: list[Row] = []
    for row in (*table.rows, None):
        if row is None or row.heading:
            yield from (_grid((), rows, widths),) if rows else ()
            rows = []
        if row is not None and row.heading:
            said = [f"{name} {cell}" for name, cell in zip(table.columns[1:], row.cells[1:], strict=True) if cell]
            yield Text.assemble((row.cells[0], "bold"), f"   {', '.join(said)}" if said else "")
        elif row is not None:
            rows.append(row)


def _grid(columns: Sequence[str], rows: Sequence[Row], widths: Sequence[int]) -> Grid:
    """`widths`: those that columns have at least, to stand below those of another grid."""
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns))
    names = ("", *(columns or ("",) * len(rows[0].cells)))
    for name, width in zip(names, (1, *(widths or (0,) * len(names))), strict=False):
        grid.add_column(name, header_style="dim", overflow="fold", min_width=width)
    for row in rows:
        mark = f"  {row.mark}" if widths else row.mark
        grid.add_row(*(Text(cell, style=STYLES.get(row.mark, "")) for cell in (mark, *row.cells)))
    return grid
