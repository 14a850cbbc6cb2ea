"""Arguments by their paths, as `plan.explain()` prints them: `args[0]['layers'][3]['w']`, or `params['layers'][3]['w']`.

In a pattern `*` stands for anything inside of one pair of brackets, `**` for anything at all.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from unity.base.errors import ConstraintError
from unity.base.formatting import pattern as shortened

Spellings = Sequence[tuple[str, ...]]  # of every argument, the ways to write its path


def spellings(fn: Callable[..., Any], paths: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Every path as it is, and with the function's own name of the argument."""
    names = _names(fn)

    def named(path: str) -> tuple[str, ...]:
        found = re.match(r"args\[(\d+)\](.*)", path, re.DOTALL)
        number = int(found[1]) if found else -1
        return (path, names[number] + found[2]) if found and number < len(names) else (path,)

    return tuple(map(named, paths))


def _names(fn: Callable[..., Any]) -> list[str]:
    """The names of a function's positional parameters, as far as they are known."""
    try:
        given = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def matching(pattern: str, known: Spellings) -> tuple[int, ...]:
    """The numbers of the arguments that a pattern matches."""
    parts = re.split(r"(\*\*|\*)", pattern)
    wild = {"**": ".*", "*": r"[^\[\]]*"}
    whole = re.compile("".join(wild.get(part, re.escape(part)) for part in parts), re.DOTALL)
    return tuple(k for k, ways in enumerate(known) if any(whole.fullmatch(way) for way in ways))


def matched(pattern: str, known: Spellings) -> tuple[int, ...]:
    """The same. Raises ConstraintError, with the paths that come nearest, if there are none."""
    found = matching(pattern, known)
    if not found:
        raise ConstraintError(f"no argument has the path {pattern}{nearest(pattern, known)} (docs: constraints#paths)")
    return found


def nearest(pattern: str, known: Spellings) -> str:
    """The paths that are most like a pattern, in words."""
    every = dict.fromkeys(shortened(way) for ways in known for way in ways)
    near = difflib.get_close_matches(shortened(pattern), every, 3, 0.3)
    return f"; the nearest are {', '.join(near)}" if near else ""
