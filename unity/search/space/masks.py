"""Masks: which of a site's values a search may take. A mask is data, so that what was listed for one site is there for its equals.

Masks say what users constrain, and what is forced where it is asked what else there would be (`unity.explain.why`). A site with a
mask has every value that it leaves, also those that shorter lists leave out (`unity.search.space.configurations`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import prod
from typing import Protocol

import numpy as np

from unity.machine.machine import Machine
from unity.pcg.parallel.marks import mark_of
from unity.pcg.parallel.wanted_types import Names, Slices
from unity.pcg.propagation.choices import Choice
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import State
from unity.search.space.dimensions import Dimensions

MOST = 100_000  # values that are listed one by one for a mask

States = tuple[State, ...]  # of a choice: of its operands, then of its results
Way = tuple[tuple[States, ...], ...]  # for every group of interchangeable axes the states along them, in no order


class Rule(Protocol):
    """Leaves a site some of its values. Rules that are equal leave the same."""

    def usable(self, choice: Choice, axis: int) -> bool:
        """Whether any value that is left may have this choice along this axis."""
        ...

    def left(self, choices: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
        """Which values are left."""
        ...


Mask = tuple[Rule, ...]
NOTHING: Mask = ()


@dataclass(frozen=True)
class Pinned:
    """An operand or result that is sliced as a user wants it, and not otherwise. `sizes`: of the mesh's axes.

    Inner digits count by the layout that they give: where a reshape cuts a dimension into [4, 1024], two of three axes slice the
    first part and one an inner digit, and together that is 8 slices.
    """

    position: int
    slices: Slices
    sizes: tuple[int, ...]

    def usable(self, choice: Choice, axis: int) -> bool:
        state = choice.states[self.position]
        for dim, want in enumerate(self.slices):
            here = state.kind == "P" and state.dim == dim
            if isinstance(want, frozenset) and (here != (axis in want) or (here and self.before(want, axis) % state.outer)):
                return False
            if isinstance(want, int) and here and want % (state.outer * self.sizes[axis]):
                return False
        return True

    def before(self, want: frozenset[int], axis: int) -> int:
        """Into how many slices a dimension is cut by the axes before one."""
        return prod(self.sizes[k] for k in want if k < axis)

    def left(self, choices: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
        states = [c.states[self.position] for c in choices]
        good = np.ones(len(picks), bool)
        for dim, want in enumerate(self.slices):
            if want is None:
                continue
            outers = np.array([s.outer if s.kind == "P" and s.dim == dim else 0 for s in states])[picks]
            here, starts = outers > 0, outers.copy()  # starts: how many slices the digits before each axis' make
            for k, size in enumerate(self.sizes):
                starts[:, k + 1 :] *= np.where(outers[:, k + 1 :] == outers[:, k, None], size, 1)
            if isinstance(want, int):
                degree = np.where(here, self.sizes, 1).prod(1)
                good &= (degree == want) & ((starts * self.sizes).max(1, initial=1) <= want)
            else:
                needed = np.array([self.before(want, k) if k in want else 0 for k in range(len(self.sizes))])
                good &= (starts == needed).all(1)
        return good


@dataclass(frozen=True)
class Along:
    """Along some axes, nothing but these choices."""

    axes: tuple[int, ...]
    choices: frozenset[States]

    def usable(self, choice: Choice, axis: int) -> bool:
        return axis not in self.axes or choice.states in self.choices

    def left(self, choices: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
        good = np.array([c.states in self.choices for c in choices])
        return np.asarray(good[picks[:, list(self.axes)]].all(1))


@dataclass(frozen=True)
class Ways:
    """These ways to split a site, or all but these. Interchangeable axes are not told apart."""

    ways: frozenset[Way]
    these: bool

    def usable(self, choice: Choice, axis: int) -> bool:
        return True

    def left(self, choices: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
        found, index = np.unique(picks, axis=0, return_inverse=True)
        ways = [way_of([choices[i].states for i in pick], axes) for pick in found]
        return np.array([(way in self.ways) == self.these for way in ways], bool)[index.reshape(-1)]


def way_of(along: Sequence[States], axes: Sequence[Axis]) -> Way:
    """What a site's states along each axis are if interchangeable axes have no names."""
    pairs = zip(axes, along, strict=True)
    return tuple(tuple(sorted(states for _, states in same)) for _, same in groupby(pairs, key=lambda p: (p[0].size, p[0].level)))


def left(mask: Mask, choices: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """The values that all of a mask's rules leave."""
    for rule in mask:
        picks = picks[rule.left(choices, picks, axes)]
    return picks


def every(mask: Mask, choices: Sequence[Choice], axes: Sequence[Axis]) -> np.ndarray:
    """All values that a mask may leave, in any order of choices; none where there would be too many to list."""
    usable = [[i for i, c in enumerate(choices) if all(r.usable(c, k) for r in mask)] for k in range(len(axes))]
    found = list(product(*usable)) if prod(map(len, usable)) <= MOST else []
    return np.array(found, np.int16).reshape(len(found), len(axes))


def names_of(machine: Machine) -> Names:
    """What the levels and the axes of a machine are called, and which axes each name means."""
    axes = {a.name: (k,) for k, a in enumerate(machine.axes)}
    return axes | {v.name: tuple(k for k, a in enumerate(machine.axes) if a.level == i) for i, v in enumerate(machine.levels)}


Restrict = Callable[[Dimensions, Machine], Mapping[int, Mask]]  # the sites of a graph that are not free, and their masks


def marked(dimensions: Dimensions, machine: Machine) -> Mapping[int, Mask]:
    """What is said in the program itself: masks of the values that `unity.constrain` marks."""
    names, sites, sizes = names_of(machine), dimensions.opened.sites, tuple(axis.size for axis in machine.axes)
    return {
        s: (Pinned(len(site.ports), mark_of(site.mark).slices(site.results[0].ndim, names), sizes),)
        for s, site in enumerate(sites)
        if site.mark is not None
    }
