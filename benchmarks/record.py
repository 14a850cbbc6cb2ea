"""What was measured, as JSON beside the benchmark: rows of figures, with the date, the machine and the versions."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unity.base.atomic_files import write

VERSIONS = ("jax", "numpy", "scipy", "numba")
RESULTS = Path(__file__).parent / "results"
BESIDE = "recorded beside the results of others that there are"


def record(name: str, rows: list[dict[str, Any]], **notes: Any) -> Path:
    """Writes `results/name.json`; an old file is replaced as a whole, or not at all."""
    content = {
        "benchmark": name,
        "date": datetime.date.today().isoformat(),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), **{p: version(p) for p in VERSIONS if find_spec(p)}},
        **notes,
        "rows": rows,
    }
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(content, indent=1) + "\n")
    return path


def results(name: str) -> dict[str, Any]:
    """Return the content of `results/name.json`: no rows if there is no such file."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


def by_case(rows: Iterable[dict[str, Any]], column: str) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each case, which a column names."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(row[column], []).append(row)
    return cases


def in_order(rows: Mapping[str, list[dict[str, Any]]], cases: Iterable[str]) -> list[dict[str, Any]]:
    """Return the rows of all cases that have some, in the order of `cases`."""
    return [row for case in cases for row in rows.get(case, ())]


def asked(description: str | None, cases: Iterable[str], recorded: str = "not recorded") -> tuple[list[str], bool]:
    """The cases that the command line names, in their order; and whether it names none, so that all are run and recorded.

    Args:
        recorded: what happens to the results of some cases, for `--help`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("cases", nargs="*", help=f"some of the cases, {recorded}")
    every, chosen = list(cases), parser.parse_args().cases
    if unknown := [name for name in chosen if name not in every]:
        parser.error(f"there are no cases {', '.join(map(repr, unknown))}, only {', '.join(map(repr, every))}")
    return [name for name in every if not chosen or name in chosen], not chosen


def record_cases(
    name: str,
    description: str | None,
    cases: Collection[str],
    column: str,
    rows_of: Callable[[str], list[dict[str, Any]]],
    **notes: Any,
) -> None:
    """Run the cases that the command line names, and record the rows of each beside those of the others.

    Args:
        name: the benchmark.
        description: its description, for `--help`.
        cases: all cases, in the order of the file.
        column: the column that names the case of a row.
        rows_of: returns the rows of a case.
        notes: what else is recorded.
    """
    chosen, whole = asked(description, cases, BESIDE)
    rows = {} if whole else by_case(results(name)["rows"], column)
    for case in chosen:
        rows[case] = rows_of(case)
        record(name, in_order(rows, cases), **notes, missing=[c for c in cases if c not in rows])


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints rows as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    columns = list(dict.fromkeys(k for row in rows for k in row))
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(_text(row.get(c)) for c in columns))
    Console(width=200).print(table)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
