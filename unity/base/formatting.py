"""Figures, source lines and paths as text for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path


def duration(seconds: float) -> str:
    """Format seconds with a suitable unit."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def size(nbytes: float) -> str:
    """Format bytes, which may be negative where memory is reused, with a suitable unit."""
    if nbytes < 0:
        return f"−{size(-nbytes)}"
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= one:
            return f"{nbytes / one:.4g} {unit}"
    return f"{nbytes:.0f} B"


def with_article(name: str) -> str:
    """Return a name, such as that of a type, with its article: by its first letter, but for a u as in uint8."""
    return f"{'an' if re.match('[aeio]|u(?!int|ni|se)', name, re.IGNORECASE) else 'a'} {name}"


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


def joined_lines(lines: Sequence[str]) -> str:
    """Return one name for argument paths of one pattern: `args[0]['conv{3-7,9}']['kernel']`.

    Numbers that differ stand in braces, or as a star where the braces would name more than the given paths.
    """
    parts = [re.split(r"(\d+)", line) for line in lines]
    columns = [tuple(dict.fromkeys(column)) for column in zip(*parts, strict=True)]
    complete = prod(map(len, columns)) == len(lines)
    return "".join(c[0] if len(c) == 1 else f"{{{_ranges(map(int, c))}}}" if complete else "*" for c in columns)


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers in order, each run of consecutive ones by its ends: `0-3,7`."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
