"""Paths of arguments, as `plan.explain()` prints them: `args[0]['layers'][3]['w']`, or `params['layers'][3]['w']`.

In a pattern `*` matches anything inside of one pair of brackets, `**` anything at all.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from unity.base.errors import ConstraintError
from unity.base.formatting import pattern as shortened

Spellings = Sequence[tuple[str, ...]]  # for every argument, the ways to write its path


def spellings(fn: Callable[..., Any], paths: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the spellings of every path: as it is, and with the function's own name of the argument."""
    names = _parameter_names(fn)

    def spelled(path: str) -> tuple[str, ...]:
        match = re.match(r"args\[(\d+)\](.*)", path, re.DOTALL)
        number = int(match[1]) if match else -1
        return (path, names[number] + match[2]) if match and number < len(names) else (path,)

    return tuple(map(spelled, paths))


def _parameter_names(fn: Callable[..., Any]) -> list[str]:
    """Return the names of a function's positional parameters, or none if it has no signature."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def matching(pattern: str, paths: Spellings) -> tuple[int, ...]:
    """Return the numbers of the arguments that a pattern matches, perhaps none."""
    parts = re.split(r"(\*\*|\*)", pattern)
    wildcards = {"**": ".*", "*": r"[^\[\]]*"}
    regex = re.compile("".join(wildcards.get(part, re.escape(part)) for part in parts), re.DOTALL)
    return tuple(k for k, spelled in enumerate(paths) if any(regex.fullmatch(path) for path in spelled))


def matched(pattern: str, paths: Spellings) -> tuple[int, ...]:
    """Return the numbers of the arguments that a pattern matches. Raises ConstraintError, with similar paths, if there are none."""
    numbers = matching(pattern, paths)
    if not numbers:
        raise ConstraintError(f"no argument has the path {pattern}{nearest(pattern, paths)} (docs: constraints#paths)")
    return numbers


def nearest(pattern: str, paths: Spellings) -> str:
    """Return a phrase that lists the paths that end in a pattern, or else the most similar ones; "" if none is similar."""
    every = dict.fromkeys(shortened(path) for spelled in paths for path in spelled)
    ends = (f"['{pattern}']", f".{pattern}")
    near = [path for path in every if path.endswith(ends)][:3] or difflib.get_close_matches(shortened(pattern), every, 3, 0.3)
    return f"; the nearest are {', '.join(near)}" if near else ""
