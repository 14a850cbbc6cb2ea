"""What commands print: results on stdout, as text or JSON; what is being done on stderr, and on a terminal only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn


def print_json(data: Any) -> None:
    """Prints data."""
    print(json.dumps(data, indent=1, ensure_ascii=False))


def errors() -> Console:
    """Where it is said what is being done."""
    from rich.console import Console

    return Console(stderr=True)


def results() -> Console:
    """Where results go. In a pipe no line is broken, since a program reads it."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    return console


@contextmanager
def stage(text: str) -> Iterator[Callable[[str], None]]:
    """Shows what is being done, with a spinner; gives what says something else. Nothing into a pipe."""
    console = errors()
    if not console.is_terminal:
        yield lambda other: None
        return
    with console.status(f"unity: {text}") as status:
        yield lambda other: status.update(f"unity: {other}")


def progress(*columns: ProgressColumn) -> Progress:
    """A bar for long work; nothing into a pipe."""
    from rich.progress import Progress

    console = errors()
    return Progress(*columns, console=console, disable=not console.is_terminal)
