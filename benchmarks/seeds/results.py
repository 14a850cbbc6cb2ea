"""What was kept of the cases, to be looked up, and how a table of it is written down."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A heading, columns, rows, and what is to be said of them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Results:
    """Everything that was kept, of all parts."""

    every: tuple[Result, ...]

    def of(self, part: str, **wanted: Any) -> list[Result]:
        """The results of a part that have these values."""
        return [r for r in self.every if r["part"].startswith(part) and all(r.get(k) == v for k, v in wanted.items())]

    def one(self, part: str, **wanted: Any) -> Result | None:
        """The only such result, if it is there and gives figures."""
        found = [r for r in self.of(part, **wanted) if usable(r)]
        return found[0] if len(found) == 1 else None

    def values(self, part: str, name: str) -> list[Any]:
        """All values of a field, each once, in the order of the cases."""
        return list(dict.fromkeys(r[name] for r in self.of(part)))


def usable(result: Result | None) -> bool:
    """Whether a case gave figures."""
    return result is not None and not {"missing", "error", "failed"} & result.keys()


def said(result: Result | None, show: Callable[[Result], str]) -> str:
    """A cell: figures, or why there are none."""
    if result is None:
        return "not run"
    for what in ("missing", "error", "failed"):
        if what in result:
            return {"missing": "not available", "error": "not possible", "failed": "failed"}[what]
    return show(result)


def ms(result: Result) -> str:
    return f"{result['time'] * 1e3:.4g}" + ("" if result.get("fits", True) else " (does not fit)")


def ratio(a: Result | None, b: Result | None, of: str = "time") -> float:
    """How many times as much the first takes as the second; not a number where one is not there."""
    if a is None or b is None or not usable(a) or not usable(b) or not b[of]:
        return math.nan
    return a[of] / b[of]


def times(x: float) -> str:
    return "" if math.isnan(x) else f"{x:.3g}"
