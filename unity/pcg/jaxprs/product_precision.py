"""The precision of a product, as `lax.dot_general` has it."""

from __future__ import annotations

from typing import Any

from jax import lax


def of_swapped_operands(precision: Any) -> Any:
    """Return a product's precision, as `lax.dot_general` has it, for the operands in the other order."""
    if isinstance(precision, lax.DotAlgorithm):  # a named tuple
        swapped = {"lhs": "rhs", "rhs": "lhs"}
        fields = (f"{side}_{what}" for side in swapped for what in ("precision_type", "component_count"))
        return precision._replace(**{name: getattr(precision, swapped[name[:3]] + name[3:]) for name in fields})
    return precision[::-1] if isinstance(precision, tuple) else precision
