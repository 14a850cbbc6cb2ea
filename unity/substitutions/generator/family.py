"""What is enumerated together: leaves of some types, operators with their attributes, and how many operators a graph may have."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unity.pcg.types.axis import Axis
from unity.substitutions.language.term import Attribute
from unity.substitutions.language.typecheck import TensorType


@dataclass(frozen=True)
class Leaf:
    """Variables of one type, `count` of them at most in a graph. `free` dimensions get other sizes when a rule is confirmed.

    `kernel`: a weight of convolutions, and so is what is made of it; nothing else is.
    """

    type: TensorType
    count: int
    free: tuple[int, ...] = ()
    kernel: bool = False


Instance = tuple[str, tuple[Attribute, ...]]  # an operator with its attributes


@dataclass(frozen=True)
class Given:
    """Two graphs that are written by hand, because they are too large to be enumerated: a rule as text, without a name.

    They are asked whatever enumerated ones are. `leaves` has its variables' types, by first appearance.
    """

    text: str
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True)
class Family:
    """One enumeration: every well-typed graph of up to `operators` of the instances, over up to `variables` of the leaves.

    `halves`: whether what was not concatenated may be split too, in halves.
    """

    name: str
    leaves: tuple[Leaf, ...]
    instances: tuple[Instance, ...]
    operators: int
    variables: int = 4
    axes: tuple[Axis, ...] = ()
    halves: bool = False
    given: tuple[Given, ...] = ()

    def limited(self, operators: int) -> Family:
        """The family with at most so many operators, or one more where it has more than the usual three."""
        return replace(self, operators=min(self.operators, operators + max(0, self.operators - 3)))
