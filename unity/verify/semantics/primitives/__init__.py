"""What every primitive means, by name: one table for all domains."""

from unity.verify.semantics.primitives import (  # noqa: F401 (they register)
    blocked,
    collectives,
    control,
    elementwise,
    indexing,
    products,
    reductions,
    shaping,
)
from unity.verify.semantics.primitives.core import MEANINGS, NotInterpreted, Run, Value, evaluate

__all__ = ["MEANINGS", "NotInterpreted", "Run", "Value", "evaluate"]
