"""The operator table: one entry for each primitive, read by capture, costs, proofs and lowering alike."""

from unity.pcg.factors import TABLE
from unity.pcg.table import algebra, contraction, elementwise, indexing, reduction, reshaping, windows  # noqa: F401 (they register)

__all__ = ["TABLE"]
