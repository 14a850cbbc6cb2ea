"""Arguments that differ in a number, as one: `args[0]['conv{3-7,9}']['kernel']`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod

ARGUMENT = re.compile(r"(args\[\d+\])(.*)")


def pattern(line: str) -> str:
    """An argument's name with its numbers left open; any other line as it is. Which argument of the function it is in stays."""
    found = ARGUMENT.fullmatch(line)
    return found[1] + re.sub(r"\d+", "#", found[2]) if found else line


def together(lines: Sequence[str]) -> str:
    """One name for arguments of one pattern: the numbers in braces, or stars where not all that braces would say are among them."""
    apart = [re.split(r"(\d+)", line) for line in lines]
    columns = [tuple(dict.fromkeys(column)) for column in zip(*apart, strict=True)]
    whole = prod(map(len, columns)) == len(lines)
    return "".join(c[0] if len(c) == 1 else f"{{{_ranges(map(int, c))}}}" if whole else "*" for c in columns)


def _ranges(numbers: Iterable[int]) -> str:
    """`0-3,7`: numbers in order, those that follow each other by the first and the last."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
