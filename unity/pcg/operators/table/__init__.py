"""The operator table: one entry for each primitive, read by capture, costs, proofs and lowering alike."""

from unity.pcg.operators.table import (  # noqa: F401 (they register)
    contraction,
    elementwise,
    indexing,
    kernels,
    linear_algebra,
    ragged,
    reduction,
    reshaping,
    windows,
)
from unity.pcg.types.factors import TABLE

BUILT_IN = dict(TABLE)  # the library's own entries; users may add others, and replace these

__all__ = ["BUILT_IN", "TABLE"]
