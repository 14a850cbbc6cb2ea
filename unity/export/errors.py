"""Why a plan cannot be written as a file."""

from __future__ import annotations

from unity.base.errors import PlanError
from unity.base.formatting import short


class ExportError(PlanError):
    """A plan that no file of plain JAX says the same as: the operator, the user's line, and why."""

    def __init__(self, source: str, operator: str, why: str) -> None:
        self.operator, self.why = operator, why
        place = f"{short(source)}: " if source else ""
        super().__init__(f"{place}{operator} cannot be exported: {why}. Nothing was written. (docs: export#what-is-refused)")
