"""The meaning of every primitive, over any domain of elements.

The modules have the names of the operator table's families (`unity.pcg.operators.table`), so that each primitive is found in both
by one name. They share no code: a proof holds what the one says against what the other says. Kernels have no meaning here: only
their authors know what they compute. Collectives and control flow are interpreted here alone.
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
