"""Of which code every result is, and when it was run: what was found by older code may be compared with care alone."""

from __future__ import annotations

import datetime
import hashlib
from collections import defaultdict
from functools import cache
from pathlib import Path

import unity
from benchmarks.seeds.results import Result, Results, Table

EARLIER = "earlier"


def stamp() -> dict[str, str]:
    """What is kept with a result."""
    return {"code": code(), "written": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")}


@cache
def code() -> str:
    """A name of the library's code, and of the models': the same for the same files alone."""
    folders = Path(unity.__file__).parent, Path(__file__).parents[1] / "models"
    content = hashlib.blake2b(digest_size=4)
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        content.update(file.read_bytes())
    return content.hexdigest()


def table(results: Results) -> Table:
    """Which algorithms' results are of which code, the newest first."""
    of = defaultdict[str, list[Result]](list)
    for r in results.every:
        of[r.get("code", EARLIER)].append(r)
    rows = []
    for name, some in sorted(of.items(), key=lambda item: max(r.get("written", "") for r in item[1]), reverse=True):
        when = sorted(r["written"] for r in some if "written" in r)
        rows.append((name, when[0] if when else "", when[-1] if when else "", str(len(some)), _listed(some)))
    notes = (f"{EARLIER}: before results had a date of their own. A search of older code may have had other prices.",)
    notes = notes if EARLIER in of else ()
    columns = ("code", "first run", "last run", "cases", "of which algorithms")
    return Table("Which code the results are of", columns, tuple(rows), notes)


def _listed(some: list[Result]) -> str:
    """Algorithms by part."""
    of = defaultdict[str, dict[str, None]](dict)
    for r in some:
        of[r["part"]][r["algorithm"]] = None
    return "; ".join(f"{part}: {', '.join(found)}" for part, found in of.items())
