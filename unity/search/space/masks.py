"""Masks: restrictions of the values of a site. A mask is plain data, so equal sites with equal masks share a domain.

Masks express the user's constraints, and the choices that an explanation forces to find alternatives (`unity.explain.why`). A
masked site has every value that the mask allows, also those that the limits of a first search would leave out
(`unity.search.space.configurations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import inf, prod
from typing import Protocol

import numpy as np

from unity.machine.machine import Machine
from unity.pcg.parallel.marks import mark_of
from unity.pcg.parallel.sharding_spec import PART, Names, ShardingSpec, Slices, part_names
from unity.pcg.propagation.choice import Choice
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import State
from unity.search.space.dimensions import ProgramDimensions

MOST = 100_000  # values that are enumerated for one mask

States = tuple[State, ...]  # the states of a choice: of its operands, then of its results
Way = tuple[tuple[States, ...], ...]  # for every group of interchangeable axes, the states along them, sorted


class MaskRule(Protocol):
    """A restriction of the values of a site; equal rules allow the same values."""

    def may_use(self, choice: Choice, axis: int) -> bool:
        """Return False if no allowed value has this choice along this axis."""
        ...

    def allows(self, choices: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
        """Return for each value whether it is allowed."""
        ...

    @property
    def most_slices(self) -> float:
        """An upper bound on the slices of a result in the allowed values; infinity if the rule implies none."""
        ...


Mask = tuple[MaskRule, ...]
NOTHING: Mask = ()


@dataclass(frozen=True)
class Pinned:
    """A rule that fixes the slicing of one operand or result.

    Inner digits count by the layout that results: if a reshape cuts a dimension into [4, 1024], two of three axes of size 2 slice
    the first part and one an inner digit, which together is 8 slices.

    Args:
        position: The position of the tensor among the operands and results.
        slices: The slicing that the user wants.
        sizes: The sizes of the mesh's axes.
    """

    position: int
    slices: Slices
    sizes: tuple[int, ...]

    def may_use(self, choice: Choice, axis: int) -> bool:
        state = choice.states[self.position]
        for dim, want in enumerate(self.slices):
            here = state.kind == "P" and state.dim == dim
            if isinstance(want, frozenset) and (here != (axis in want) or (here and self.before(want, axis) % state.outer)):
                return False
            if isinstance(want, int) and here and want % (state.outer * self.sizes[axis]):
                return False
        return True

    def before(self, want: frozenset[int], axis: int) -> int:
        """Return the number of slices into which the axes before `axis` cut a dimension."""
        return prod(self.sizes[k] for k in want if k < axis)

    def allows(self, choices: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
        states = [c.states[self.position] for c in choices]
        good = np.ones(len(picks), bool)
        for dim, want in enumerate(self.slices):
            if want is None:
                continue
            outers = np.array([s.outer if s.kind == "P" and s.dim == dim else 0 for s in states])[picks]
            here, starts = outers > 0, outers.copy()  # starts: the number of slices that the digits before each axis make
            for k, size in enumerate(self.sizes):
                starts[:, k + 1 :] *= np.where(outers[:, k + 1 :] == outers[:, k, None], size, 1)
            if isinstance(want, int):
                degree = np.where(here, self.sizes, 1).prod(1)
                good &= (degree == want) & ((starts * self.sizes).max(1, initial=1) <= want)
            else:
                needed = np.array([self.before(want, k) if k in want else 0 for k in range(len(self.sizes))])
                good &= (starts == needed).all(1)
        return good

    @property
    def most_slices(self) -> float:
        return prod(
            inf if want is None else want if isinstance(want, int) else self.before(want, len(self.sizes)) for want in self.slices
        )


@dataclass(frozen=True)
class Along:
    """A rule that allows only these choices along some axes."""

    axes: tuple[int, ...]
    choices: frozenset[States]

    def may_use(self, choice: Choice, axis: int) -> bool:
        return axis not in self.axes or choice.states in self.choices

    def allows(self, choices: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
        good = np.array([c.states in self.choices for c in choices])
        return np.asarray(good[picks[:, list(self.axes)]].all(1))

    @property
    def most_slices(self) -> float:
        return inf


@dataclass(frozen=True)
class SplitSet:
    """A rule that allows these ways to split a site, or all but these, without distinguishing interchangeable axes."""

    ways: frozenset[Way]
    allowed: bool  # whether these ways are allowed, or all others

    def may_use(self, choice: Choice, axis: int) -> bool:
        return True

    def allows(self, choices: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
        distinct, index = np.unique(picks, axis=0, return_inverse=True)
        ways = [way_of([choices[i].states for i in pick], axes) for pick in distinct]
        return np.array([(way in self.ways) == self.allowed for way in ways], bool)[index.reshape(-1)]

    @property
    def most_slices(self) -> float:
        return inf


def way_of(along: Sequence[States], axes: Sequence[Axis]) -> Way:
    """Return a site's states along the axes in a form that does not distinguish interchangeable axes."""
    pairs = zip(axes, along, strict=True)
    return tuple(tuple(sorted(states for _, states in same)) for _, same in groupby(pairs, key=lambda p: p[0].extent))


def allowed(mask: Mask, choices: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """Return the values that all rules of a mask allow."""
    for rule in mask:
        picks = picks[rule.allows(choices, picks, axes)]
    return picks


def listed(mask: Mask, choices: Sequence[Choice], axes: Sequence[Axis]) -> np.ndarray:
    """Return all values that a mask may allow, in any order of choices; none if there are too many to list."""
    usable = [[i for i, c in enumerate(choices) if all(r.may_use(c, k) for r in mask)] for k in range(len(axes))]
    values = list(product(*usable)) if prod(map(len, usable)) <= MOST else []
    return np.array(values, np.int16).reshape(len(values), len(axes))


def names_of(machine: Machine) -> Names:
    """Return the names of a machine's levels and axes, each with the axes that it stands for.

    Where an axis of the user's has the name of a level, the name is the axis's. A level that is not made of whole axes has no name.
    """
    names: dict[str, tuple[int, ...]] = {name: () for name, _ in machine.mesh}
    names.update((axis.name, (k,)) for k, axis in enumerate(machine.axes))
    names.update((part, names[axis]) for axis, part in part_names(dict(machine.mesh)).items())
    for index, level in enumerate(machine.levels):
        over = [k for k, axis in enumerate(machine.axes) if any(at == index for at, _ in axis.extent)]
        if prod(machine.axes[k].size for k in over) == level.size:
            names.setdefault(level.name, tuple(over))
            if not machine.mesh:
                names.update(_parts(level.name, over, [machine.axes[k].size for k in over]))
    return names


def _parts(level: str, over: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names of the runs of a level's axes (`sharding_spec.PART`), each with the axes that it stands for."""
    for i in range(len(over)):
        for j in range(i + 1, len(over) + 1):
            start = prod(sizes[:i])
            yield f"{level}{PART}{start}{PART}{start * prod(sizes[i:j])}", tuple(over[i:j])


def pinned(position: int, sharding: ShardingSpec, rank: int, machine: Machine) -> Pinned:
    """Return the rule that fixes the sharding of an operand or result. Raises ConstraintError if its rank does not allow it."""
    return Pinned(position, sharding.slices(rank, names_of(machine)), tuple(axis.size for axis in machine.axes))


Restrict = Callable[[ProgramDimensions, Machine], Mapping[int, Mask]]  # returns the masks of the constrained sites


def marked(dimensions: ProgramDimensions, machine: Machine) -> Mapping[int, Mask]:
    """Return the masks of the values that the program itself marks with `unity.constrain`."""
    return {
        s: (pinned(len(site.ports), mark_of(site.mark), site.results[0].ndim, machine),)
        for s, site in enumerate(dimensions.opened.sites)
        if site.mark is not None
    }
