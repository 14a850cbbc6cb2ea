"""The meaning of every primitive, over any domain of elements.

The modules have the names of the operator table's families (`unity.pcg.operators.table`), so that a primitive is in files of the
same name there and here. They share no code, because a proof compares the two. Kernels have no meaning here: only their authors
know what they compute. Collectives and control flow have a meaning here but no entry in the table.
"""

from unity.verify.semantics.primitives import (  # noqa: F401 (they register)
    collectives,
    contraction,
    control_flow,
    elementwise,
    indexing,
    linear_algebra,
    ragged,
    reduction,
    reshaping,
    windows,
)
from unity.verify.semantics.primitives.core import MEANINGS, InterpreterRun, NotInterpreted, StackedValue, evaluate

__all__ = ["MEANINGS", "InterpreterRun", "NotInterpreted", "StackedValue", "evaluate"]
