"""Figures, source lines and paths as text for people."""

from __future__ import annotations

import re
from pathlib import Path


def duration(seconds: float) -> str:
    """Format seconds with a suitable unit."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def size(nbytes: float) -> str:
    """Format bytes with a suitable unit."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= one:
            return f"{nbytes / one:.4g} {unit}"
    return f"{nbytes:.0f} B"


def pattern(path: str) -> str:
    """Replace the layer numbers in a path by `*`, so that equal layers share one row."""
    argument, bracket, rest = path.partition("]")
    return argument + bracket + re.sub(r"(?<=\[)\d+(?=\])|(?<=_)\d+(?=\W)", "*", rest)


def short(source: str) -> str:
    """Shorten a source line to its file, line and function: `model.py:42 (block)`."""
    match = re.match(r"(.*?):(\d+)(?::\d+)?(.*)", source)
    if not match:
        return source
    function = match[3].strip(" ()").split(".<locals>.")[-1]
    return f"{Path(match[1]).name}:{match[2]}" + (f" ({function})" if function else "")
