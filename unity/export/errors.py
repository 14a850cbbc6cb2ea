"""The error of plans that cannot be exported."""

from __future__ import annotations

from unity.base.errors import PlanError
from unity.base.formatting import short


class ExportError(PlanError):
    """A plan that has no counterpart in plain JAX: the operator, the source line, and the reason."""

    def __init__(self, source: str, operator: str, why: str) -> None:
        self.operator, self.why = operator, why
        place = f"{short(source)}: " if source else ""
        super().__init__(f"{place}{operator} cannot be exported: {why}. Nothing was written. (docs: export#what-is-refused)")
