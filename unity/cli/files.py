"""The files that the command line reads and writes: plans, and graphs as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unity.base.atomic_files import save
from unity.base.documents import document_kind, parsed
from unity.base.errors import PlanError, PlanFileError, file_fault
from unity.pcg.ir import compact_json, graph_json
from unity.plan.files.plan_file import read as read_plan
from unity.plan.files.plan_file import summaries
from unity.plan.summary import Summary


def read(path: Path) -> tuple[Summary, ...]:
    """Return the summaries in a file: for a plan, of the captured and of the planned program; for a graph, one without costs.

    Raises:
        PlanError: the file cannot be read, is not one of unity's, or has another version.
    """
    data = _read_json(path)
    mark = data.get("unity") if isinstance(data, dict) else None
    if mark == "plan":
        return summaries(path, read_plan(path))
    readers = {"graph": graph_json.from_json, compact_json.MARK: compact_json.unfold}
    if not isinstance(mark, str) or mark not in readers:
        other = f"is {kind}," if (kind := document_kind(data)) else "is"
        raise PlanError(
            f"{path} {other} neither a plan nor a graph that unity saved (plan.files.save, unity.pcg.ir.graph_json.to_json)"
        )
    try:
        graph = readers[mark](data)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    return (Summary("graph", "", 0, 0.0, 0.0, graph, (), ()),)  # without a machine, a graph has no costs


def _read_json(path: Path) -> Any:
    try:
        return parsed(path.read_bytes())
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {file_fault(error)}") from error
    except PlanFileError as error:
        raise PlanError(f"{path} cannot be read: {error}") from error


def write(text: str, path: Path | None) -> None:
    """Print a text, or write it to a file, which is replaced as a whole or not at all.

    Raises:
        PlanError: the file cannot be written.
    """
    if path is None:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    save(path, text)
