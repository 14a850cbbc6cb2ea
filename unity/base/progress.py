"""The current stage of a long computation, shown on stderr: a spinner on a terminal, a line or nothing in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stages(is_shown: bool = True) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Yield two functions that show the current stage with a spinner on a terminal.

    Elsewhere the first does nothing, and the second, for stages that take minutes, prints a line.
    """
    if not is_shown:
        yield (lambda stage: None), (lambda stage: None)
        return
    from rich.console import Console  # takes a while to import

    console = Console(stderr=True)
    if not console.is_terminal:
        yield (lambda stage: None), (lambda stage: print(f"unity: {stage}", file=sys.stderr, flush=True))
        return
    with console.status("unity") as status:

        def say(stage: str) -> None:
            status.update(f"unity: {stage}")

        yield say, say
