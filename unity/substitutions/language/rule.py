"""Rules: pairs of sides that compute the same under conditions, as data without code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from unity.base.errors import RuleError
from unity.pcg.types.parallel_type import State
from unity.substitutions.language.term import Term, attribute_variables, variables


@dataclass(frozen=True, order=True)
class HasState:
    """The condition that variable `tensor` is in `state` along `axis`. A variable without such a condition is unused there."""

    tensor: str
    axis: str
    state: State


@dataclass(frozen=True, order=True)
class EqualSizes:
    """The condition that dimension `dim` of one variable is as long as `other_dim` of another."""

    tensor: str
    dim: int
    other: str
    other_dim: int


@dataclass(frozen=True, order=True)
class Rank:
    """The condition that a variable has a certain rank."""

    tensor: str
    rank: int


@dataclass(frozen=True, order=True)
class Different:
    """The condition that two dimensions, given as attribute variables or numbers, differ."""

    left: str
    right: str | int


Condition = HasState | EqualSizes | Rank | Different
C = TypeVar("C", HasState, EqualSizes, Rank, Different)


@dataclass(frozen=True)
class Rule:
    """The law `left = right`, output by output, wherever both sides are well-typed and the conditions hold.

    Axis variables stand for any axis, so that one rule covers every degree; dimension variables stand for any dimension that both
    sides have. Raises RuleError if a condition names a variable that neither side has, or if the sides have different numbers of
    outputs.
    """

    name: str
    left: tuple[Term, ...]
    right: tuple[Term, ...]
    conditions: tuple[Condition, ...] = ()

    def __post_init__(self) -> None:
        if len(self.left) != len(self.right):
            raise RuleError(f"rule {self.name}: one side has {len(self.left)} outputs, the other {len(self.right)}")
        bound = {*self.variables, *self.attributes}
        for condition in self.conditions:
            names = [v for k, v in vars(condition).items() if isinstance(v, str) and k != "state"]
            for name in names:
                if name not in bound:
                    raise RuleError(f"rule {self.name}: the condition on {name} has no such variable in either side")

    @property
    def sides(self) -> tuple[Term, ...]:
        return self.left + self.right

    @property
    def variables(self) -> tuple[str, ...]:
        """Tensor variables, by first appearance."""
        return variables(self.sides)

    @property
    def attributes(self) -> dict[str, str]:
        """Attribute variables and their kinds: "dim", "size" or "axis"."""
        return attribute_variables(self.sides)

    def of_kind(self, kind: str) -> tuple[str, ...]:
        """Return the attribute variables of a kind."""
        return tuple(name for name, its_kind in self.attributes.items() if its_kind == kind)

    @property
    def parallel(self) -> bool:
        """Whether the rule has axis variables."""
        return bool(self.of_kind("axis"))

    @property
    def instances(self) -> int:
        """The number of rules without attribute variables that this rule covers, if each of its variables had only a few values.

        Axes are not counted: a rule covers every degree.
        """
        counts = {"dim": 2, "size": 2, "groups": 2, "padding": 2, "function": 3}
        free = [counts[kind] for kind in self.attributes.values() if kind != "axis"]
        different = sum(isinstance(c.right, str) for c in self.conditions_of(Different))
        return max(1, prod(free) // 2**different)  # of two dimensions with two values each, half of all pairs differ

    def conditions_of(self, kind: type[C]) -> Iterator[C]:
        """Return the conditions of a class."""
        return (c for c in self.conditions if isinstance(c, kind))


def content_hash(text: str) -> str:
    """Return the hash of a rule's text, which identifies the rule."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
