"""How figures, lines and paths are said to people, wherever they are shown."""

from __future__ import annotations

import re
from pathlib import Path


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def size(nbytes: float) -> str:
    """Bytes in the unit that suits them."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= one:
            return f"{nbytes / one:.4g} {unit}"
    return f"{nbytes:.0f} B"


def pattern(path: str) -> str:
    """A path with its layer numbers left open, so that equal layers are one row."""
    argument, bracket, rest = path.partition("]")
    return argument + bracket + re.sub(r"(?<=\[)\d+(?=\])|(?<=_)\d+(?=\W)", "*", rest)


def short(source: str) -> str:
    """A source line without its folders and column: `model.py:42 (block)`."""
    found = re.match(r"(.*?):(\d+)(?::\d+)?(.*)", source)
    if not found:
        return source
    function = found[3].strip(" ()").split(".<locals>.")[-1]
    return f"{Path(found[1]).name}:{found[2]}" + (f" ({function})" if function else "")
