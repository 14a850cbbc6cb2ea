"""Sizes of an optimizer's state, and the memory that it lies in: the part that is divided like the weights, and the rest.

The rest, which every device stores, is on the device. The other part may be in the memory of the host: then the update fetches it,
and sends it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from unity.pcg.ir.graph import Node
from unity.pcg.ir.payloads import Input


class StateMemory(StrEnum):
    """The memory that the divided part of an optimizer's state lies in. `EITHER` leaves that to the search, for each weight."""

    DEVICE = "device"
    HOST = "host"
    EITHER = "either"


@dataclass(frozen=True)
class StateSizes:
    """Sizes of an optimizer's state.

    Args:
        slots: Bytes that are divided like a weight, for each byte of the weight.
        others: The same for weights with another number of them, by the argument's name.
        whole: Bytes that every device stores, such as counts and factored moments.
        memory: The memory that the divided bytes lie in. A graph's inputs tell which the search chose.
    """

    slots: float
    others: tuple[tuple[str, float], ...] = ()
    whole: int = 0
    memory: StateMemory = StateMemory.DEVICE

    def of(self, weight: Node) -> float:
        """Return the bytes that are divided like a weight, for each byte of it."""
        return self._by_name.get(weight.name, self.slots)

    def on_host(self, weight: Node) -> float:
        """Return the part of `of` that is in the memory of the host: all or nothing."""
        chosen = isinstance(weight.payload, Input) and weight.payload.state_on_host
        is_there = self.memory is StateMemory.HOST or (self.memory is StateMemory.EITHER and chosen)
        return self.of(weight) if is_there else 0

    def on_device(self, weight: Node) -> float:
        """Return the part of `of` that is on the device: all or nothing."""
        return self.of(weight) - self.on_host(weight)

    @property
    def leanest(self) -> StateSizes:
        """The sizes where all of the divided bytes are on the host, if they may be."""
        return self if self.memory is StateMemory.DEVICE else replace(self, memory=StateMemory.HOST)

    @cached_property
    def _by_name(self) -> Mapping[str, float]:
        return dict(self.others)


NO_STATE, ADAM = StateSizes(0), StateSizes(2)
