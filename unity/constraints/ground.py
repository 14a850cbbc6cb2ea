"""What constraints are held against: a program on a machine, its arguments by path, its dimensions by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from unity.base.errors import ConstraintError
from unity.constraints.paths import Spellings, matched
from unity.machine.machine import Machine
from unity.pcg.parallel.wanted_types import Names, Wanted, axes_of
from unity.pcg.propagation.choices import Choice
from unity.pcg.types.parallel_type import State, partitioned
from unity.search.space.dimensions import ProgramDimensions
from unity.search.space.masks import Along, Pinned, names_of

Dimension = str | tuple[str, int]  # one of `KINDS`, or a dimension of the arguments with a path
KINDS = ("samples", "tensor", "weights")


@dataclass(frozen=True, eq=False)
class Ground:
    """A program's dimensions on a machine. `inputs`: the sites of the arguments, in the order of their paths."""

    dimensions: ProgramDimensions
    machine: Machine
    paths: Spellings
    inputs: tuple[int, ...]

    @cached_property
    def names(self) -> Names:
        return names_of(self.machine)

    def level(self, name: str) -> tuple[int, ...]:
        """The axes of a level (or of an axis). Raises ConstraintError if there is none of that name."""
        return axes_of(name, self.names)

    def pinned(self, position: int, wanted: Wanted, rank: int) -> Pinned:
        """The rule for an operand or result of this rank. Raises ConstraintError where it cannot be as is wanted."""
        return Pinned(position, wanted.slices(rank, self.names), tuple(axis.size for axis in self.machine.axes))

    def follows(self, dimension: Dimension) -> Callable[[int, int], bool]:
        """Whether what a site splits (by its number, and that of a dimension of the program) is a dimension of this kind.

        Samples: the first dimension of every argument that is no weight, after the steps of a loop, wherever it goes. Weights:
        what is made of weights alone, split in any other dimension. Tensor: everything else.
        """
        d = self.dimensions
        if isinstance(dimension, tuple):
            path, dim = dimension
            given = [self.inputs[k] for k in matched(path, self.paths)]
            ranks = {d.of_slot[s, 0, partitioned(dim)] for s in given if (s, 0, partitioned(dim)) in d.of_slot}
            if not ranks:
                raise ConstraintError(f"{path} has no dimension {dim} that could be split")
            return lambda s, r: r in ranks
        if dimension == "samples":
            return lambda s, r: r in d.samples
        return lambda s, r: r not in d.samples and d.weights[s] == (dimension == "weights")

    def split(self, s: int, wanted: Callable[[int, int], bool]) -> tuple[bool, ...]:
        """For every choice of a site, whether it splits a dimension that is wanted."""
        pairs = zip(self.dimensions.choices[s], self.dimensions.rank[s], strict=True)
        return tuple(splits(choice) and wanted(s, rank) for choice, rank in pairs)

    def along(self, s: int, axes: tuple[int, ...], good: tuple[bool, ...]) -> Along:
        """Nothing but some of a site's choices along some axes. Along those of branches' groups a site has one choice, which splits
        nothing."""
        pairs = zip(self.dimensions.choices[s], good, strict=True)
        groups = self.dimensions.opened.sites[s].along
        free = tuple(k for k in axes if self.machine.axes[k].name not in groups)
        return Along(free, frozenset(choice.states for choice, flag in pairs if flag))

    def splits_a(self, dimension: Dimension) -> Callable[[int, int, State], bool | None]:
        """Whether a result of a site in this state is split in such a dimension; None: it cannot be told."""
        wanted, slots = self.follows(dimension), self.dimensions.of_slot
        return lambda s, k, state: wanted(s, slots[s, k, state]) if (s, k, state) in slots else None


def splits(choice: Choice) -> bool:
    """Whether a choice splits anything at all."""
    return any(state.kind == "P" for state in choice.states)
