"""Random edits of JSON documents."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

OTHERS: tuple[Any, ...] = (
    None, True, -1, 0, 3, 10**30, -(2**63), 0.5, float("nan"), float("inf"), "", "x", "P9/0", "é\ud800", [], [[]], [1, 2], {},
    {"a": 1},
)  # fmt: skip


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every item in a document: what holds it, and its key."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield data, key
        yield from places(value)


def edited(data: Any, draw: random.Random) -> tuple[Any, str]:
    """Returns a copy of a document with one edit, which changes it, and what that was."""
    while True:
        changed = copy.deepcopy(data)
        # all depths alike: a large part of a file would have nearly all edits otherwise
        holder, key = draw.choice([(changed, k) for k in changed])
        while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.75:
            holder = holder[key]
            key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        value, kind = holder[key], draw.choice(["delete", "replace", "replace", "truncate", "repeat", "swap", "number", "rename"])
        if kind == "delete":
            del holder[key]
        elif kind == "replace":
            holder[key] = copy.deepcopy(draw.choice(OTHERS))
        elif kind == "truncate" and isinstance(value, list | str) and value:
            holder[key] = value[: draw.randrange(len(value))]
        elif kind == "repeat" and isinstance(value, list | str) and value:
            holder[key] = value * 2
        elif kind == "swap":
            other_holder, other = draw.choice(list(places(changed)))
            try:
                other_holder[other], holder[key] = value, other_holder[other]
            except (TypeError, LookupError):
                continue
        elif kind == "number" and isinstance(value, int | float):
            holder[key] = draw.choice([-value, value + 1, value * 2, value / 2, 10**20])
        elif kind == "rename" and isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        else:
            continue
        try:
            if not _same(changed, data):
                return changed, f"{kind} {key}"
        except RecursionError:  # something was put into itself
            continue


def _same(a: Any, b: Any) -> bool:
    """Whether two documents are equal, and of equal kinds: 1 and 1.0 and true differ."""
    return repr(a) == repr(b)
