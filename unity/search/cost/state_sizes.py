"""Sizes of an optimizer's state: the part that is divided like the weights, and the part that every device stores whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from unity.pcg.ir.graph import Node


@dataclass(frozen=True)
class StateSizes:
    """Sizes of an optimizer's state.

    Args:
        slots: Bytes that are divided like a weight, for each byte of the weight.
        others: The same for weights with another number of them, by the argument's name.
        whole: Bytes that every device stores, such as counts and factored moments.
    """

    slots: float
    others: tuple[tuple[str, float], ...] = ()
    whole: int = 0

    def of(self, weight: Node) -> float:
        """Return the bytes that are divided like a weight, for each byte of it."""
        return self._by_name.get(weight.name, self.slots)

    @cached_property
    def _by_name(self) -> Mapping[str, float]:
        return dict(self.others)


NO_STATE, ADAM = StateSizes(0), StateSizes(2)
