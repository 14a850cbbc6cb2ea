"""The operator table: one entry for each primitive, read by capture, costs, proofs and lowering alike."""

from unity.pcg.factors import TABLE
from unity.pcg.table import (  # noqa: F401 (they register)
    algebra,
    contraction,
    elementwise,
    indexing,
    kernels,
    ragged,
    reduction,
    reshaping,
    windows,
)

__all__ = ["TABLE"]
