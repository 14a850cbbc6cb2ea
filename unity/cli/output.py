"""Output of commands: results on stdout, as text or JSON; progress on stderr, on a terminal or where devices are measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.table import Table

from unity.base.progress import stages


def print_json(data: Any) -> None:
    """Print data as JSON."""
    print(json.dumps(data, indent=1, ensure_ascii=False))


def error_console() -> Console:
    """Return the console for progress, which is stderr."""
    return Console(stderr=True)


def result_console() -> Console:
    """Return the console for results, which is stdout. In a pipe no line is broken, since a program may read it."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    return console


@contextmanager
def stage(text: str, is_announced: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a spinner with a text while the block runs, and yield a function that changes the text.

    In a pipe nothing is shown, or the text alone as a line if it is to be announced.
    """
    with stages() as (say, announce):
        (announce if is_announced else say)(text)
        yield say


def progress(*columns: ProgressColumn) -> Progress:
    """Return a progress bar, which shows nothing in a pipe."""
    console = error_console()
    return Progress(*columns, console=console, disable=not console.is_terminal)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows as a table with a title."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*map(str, row))
    result_console().print(table)
