"""Families of graphs that are enumerated together: their leaves, their operators, and their largest size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unity.pcg.types.axis import Axis
from unity.substitutions.language.term import Attribute
from unity.substitutions.language.typecheck import TensorType


@dataclass(frozen=True)
class FamilyLeaf:
    """Variables of one type.

    Attributes:
        type: of the variables.
        count: the most variables of this type in a graph.
        free: the dimensions that take other sizes when a rule is confirmed.
        kernel: whether they, and graphs of nothing but them, are weights of convolutions.
    """

    type: TensorType
    count: int
    free: tuple[int, ...] = ()
    kernel: bool = False


Instance = tuple[str, tuple[Attribute, ...]]  # an operator with its attributes


@dataclass(frozen=True)
class WrittenPair:
    """Two graphs written by hand, because they are too large to be enumerated, as the text of a rule without a name.

    They pass the same checks as enumerated ones. `leaves` has the types of their variables, by first appearance.
    """

    text: str
    leaves: tuple[FamilyLeaf, ...]


@dataclass(frozen=True)
class Family:
    """One enumeration.

    Attributes:
        name: of the family.
        leaves: the variables of graphs.
        instances: the operators of graphs.
        operators: the most operators in a graph.
        variables: the most variables in a graph.
        axes: of the mesh.
        halves: whether tensors that were not concatenated are also split, in halves.
        written: pairs of graphs beside the enumerated ones.
    """

    name: str
    leaves: tuple[FamilyLeaf, ...]
    instances: tuple[Instance, ...]
    operators: int
    variables: int = 4
    axes: tuple[Axis, ...] = ()
    halves: bool = False
    written: tuple[WrittenPair, ...] = ()

    def limited(self, operators: int) -> Family:
        """Return the family with at most `operators` operators in a graph, and as many more as it has above the usual three."""
        return replace(self, operators=min(self.operators, operators + max(0, self.operators - 3)))
