"""The files that a plan is written to: a plan file, a report, plain JAX, constraints in the user's source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unity.export import Annotation
    from unity.plan.plan import Plan


class PlanFiles:
    """`plan.files`: a plan as files. An old file stays intact if writing fails."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, with its frontier if that is known, or else some points of it (docs: plan#the-frontier).

        The file has the figures of the report, which include `plan.inspect.bound`.
        """
        from unity.plan.files.plan_file import save

        save(path, self._plan)

    def report(self, path: str | Path) -> None:
        """Write a self-contained HTML page: graph, steps, frontier, timeline, memory, and each device's part of every tensor.

        Needs jinja2 (the extra `html`). The page shows some points of the frontier, or all of it if `plan.frontier` was accessed,
        and computes `plan.inspect.bound`.
        """
        from unity.report import content, of_plan, save

        save(content(of_plan(self._plan)), path)

    def export(self, path: str | Path) -> None:
        """Write the plan as a Python file of plain JAX, with every collective written out, that does not need this library.

        Raises ExportError, naming the operator and the line, if an operator has no counterpart in public JAX (docs: export).
        """
        from unity.export import write

        write(self._plan, path)

    def annotate(self, path: str | Path) -> Annotation:
        """Return a file of the user's source with the sharding constraints written in. It prints as a diff; nothing is written.

        Constraints are at the expressions at which `plan.constrained()` has them. The lines where none can be written are in
        `unannotated`, with reasons.

        Args:
            path: the file in which the function computes.

        Raises:
            PlanError: the file is not Python source, has none of the function's lines, or the plan has a pipeline,
                branches or micro-batches.
        """
        from unity.export import annotate

        return annotate(self._plan, path)
