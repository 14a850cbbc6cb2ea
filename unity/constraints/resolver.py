"""Resolution of the names in constraints (paths, dimensions, levels) against a program on a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from unity.base.errors import ConstraintError
from unity.constraints.paths import Spellings, matched
from unity.machine.machine import Machine
from unity.pcg.parallel.sharding_spec import Names, ShardingSpec, axes_of
from unity.pcg.propagation.choice import Choice
from unity.pcg.types.parallel_type import State, partitioned
from unity.search.space.dimensions import ProgramDimensions
from unity.search.space.masks import Along, Pinned, names_of, pinned

Kind = Literal["samples", "tensor", "weights"]
KINDS: tuple[str, ...] = get_args(Kind)
Dimension = str | tuple[str, int]  # one of `KINDS`, or a path of arguments and the number of their dimension


@dataclass(frozen=True, eq=False)
class Resolver:
    """The dimensions of a program and the axes of a machine, by the names that constraints use.

    Attributes:
        paths: the spellings of the arguments' paths.
        inputs: the sites of the arguments, in the order of their paths.
    """

    dimensions: ProgramDimensions
    machine: Machine
    paths: Spellings
    inputs: tuple[int, ...]

    @cached_property
    def names(self) -> Names:
        return names_of(self.machine)

    def level(self, name: str) -> tuple[int, ...]:
        """Return the axes of a level, or the axis of that name. Raises ConstraintError if the machine has neither."""
        return axes_of(name, self.names)

    def pinned(self, position: int, sharding: ShardingSpec, rank: int) -> Pinned:
        """Return the rule that fixes the sharding of an operand or result. Raises ConstraintError if its rank does not allow it."""
        return pinned(position, sharding, rank, self.machine)

    def follows(self, dimension: Dimension) -> Callable[[int, int], bool]:
        """Return a predicate: whether a site (by number) that splits a dimension of the program (by rank) splits `dimension`.

        "samples" is the first dimension of every argument that is not a weight, without the steps of a loop, followed through the
        program. "weights" is any other dimension of values computed from weights alone. "tensor" is every remaining dimension.
        """
        d = self.dimensions
        if isinstance(dimension, tuple):
            path, dim = dimension
            arguments = [self.inputs[k] for k in matched(path, self.paths)]
            ranks = {d.of_slot[s, 0, partitioned(dim)] for s in arguments if (s, 0, partitioned(dim)) in d.of_slot}
            if not ranks:
                raise ConstraintError(f"{path} has no dimension {dim} that could be split")
            return lambda s, r: r in ranks
        if dimension == "samples":
            return lambda s, r: r in d.samples
        return lambda s, r: r not in d.samples and d.weights[s] == (dimension == "weights")

    def split(self, s: int, follows: Callable[[int, int], bool]) -> tuple[bool, ...]:
        """Return, for every choice of a site, whether it splits a dimension that satisfies a predicate of `follows`."""
        pairs = zip(self.dimensions.choices[s], self.dimensions.rank[s], strict=True)
        return tuple(splits(choice) and follows(s, rank) for choice, rank in pairs)

    def along(self, s: int, axes: tuple[int, ...], allowed: tuple[bool, ...]) -> Along:
        """Return the rule that allows only some of a site's choices along some axes.

        Axes of branches' groups are left out: along these a site has a single choice, which splits nothing.
        """
        pairs = zip(self.dimensions.choices[s], allowed, strict=True)
        groups = self.dimensions.opened.sites[s].along
        free = tuple(k for k in axes if self.machine.axes[k].name not in groups)
        return Along(free, frozenset(choice.states for choice, flag in pairs if flag))

    def splits_a(self, dimension: Dimension) -> Callable[[int, int, State], bool | None]:
        """Return a predicate of a site, a result's number and its state: whether the result is split in `dimension`.

        The predicate returns None where the state does not tell the dimension of the program.
        """
        follows, slots = self.follows(dimension), self.dimensions.of_slot
        return lambda s, k, state: follows(s, slots[s, k, state]) if (s, k, state) in slots else None


def splits(choice: Choice) -> bool:
    """Return whether a choice splits any operand or result."""
    return any(state.kind == "P" for state in choice.states)
