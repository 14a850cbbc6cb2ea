"""Files that the command line shows and compares: plans, and graphs as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unity.base.atomic_files import save
from unity.base.errors import PlanError
from unity.pcg.ir import compact_json as folded
from unity.pcg.ir import graph_json as serialize
from unity.pcg.ir.graph import PCG
from unity.plan.summary import Summary


def read(path: Path) -> tuple[Summary, ...]:
    """What a file holds: of a plan, the program as captured and as planned; of a graph, the graph.

    Raises PlanError if it cannot be read, is not of unity, or of another version.
    """
    data = _json(path)
    mark = data.get("unity") if isinstance(data, dict) else None
    if mark == "plan":
        from unity.plan.plan_file import read as plan
        from unity.plan.plan_file import summaries

        return summaries(path, plan(path))
    readers = {"graph": serialize.from_json, folded.MARK: folded.unfold}
    if not isinstance(mark, str) or mark not in readers:
        raise PlanError(f"{path} is neither a plan nor a graph that unity saved (plan.save, unity.pcg.ir.graph_json.to_json)")
    try:
        return (_unpriced(path, readers[mark](data)),)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # the first: no UTF-8, or no JSON
        raise PlanError(f"{path} is no JSON: {error}") from error


def _unpriced(path: Path, graph: PCG) -> Summary:
    """A graph alone, which no machine is known for."""
    return Summary("graph", "", 0, 0.0, 0.0, graph, (), ())


def write(text: str, path: Path | None) -> None:
    """Prints, or writes a file, which is replaced as a whole or not at all. Raises PlanError if it cannot be written."""
    if path is None:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    save(path, text)
