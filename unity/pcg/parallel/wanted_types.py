"""What a user wants of a tensor's type: a `PartitionSpec`, whose names may be axes of the mesh or whole levels of the machine."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from jax.sharding import PartitionSpec

from unity.base.errors import ConstraintError
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Type, digits

# Of one dimension: the axes or levels that slice it (none: it is whole), or a number of slices, over whatever axes, or anything.
Entry = tuple[str, ...] | int | None
Slices = tuple[frozenset[int] | int | None, ...]  # the same with the axes by their numbers, for every dimension
Names = Mapping[str, tuple[int, ...]]  # of axes and levels, and which axes each means


@dataclass(frozen=True)
class Wanted:
    """A specification as plain data. Dimensions after the last entry are whole."""

    entries: tuple[Entry, ...]

    def slices(self, rank: int, names: Names) -> Slices:
        """What is wanted of every dimension of a tensor of this rank, on a mesh.

        Raises ConstraintError where there are more entries than dimensions, a name is not known, or an axis is named twice.
        """
        if len(self.entries) > rank:
            raise ConstraintError(f"{self} has {len(self.entries)} entries, for a tensor of {rank} dimensions")
        taken: list[int] = []
        found: list[frozenset[int] | int | None] = []
        for entry in (*self.entries, *((),) * (rank - len(self.entries))):
            if isinstance(entry, tuple):
                axes = [k for name in entry for k in axes_of(name, names)]
                if any(a > b for a, b in pairwise(axes)):
                    order = tuple(sorted(entry, key=lambda name: names[name]))
                    raise ConstraintError(f"{self}: slices nest in the order of the mesh, outermost first: write {order}")
                taken += axes
                found.append(frozenset(axes))
            else:
                found.append(entry)
        if len(taken) > len(set(taken)):
            raise ConstraintError(f"{self}: an axis can slice a tensor only once")
        return tuple(found)

    def __str__(self) -> str:
        return f"P({', '.join(map(_entry_text, self.entries))})"

    def to_json(self) -> list[Any]:
        """As JSON data."""
        return [list(e) if isinstance(e, tuple) else e for e in self.entries]

    @staticmethod
    def from_json(data: Any) -> Wanted:
        """What `to_json` wrote."""
        return Wanted(tuple(tuple(map(str, e)) if isinstance(e, list) else e for e in data))


def wanted(spec: Any) -> Wanted:
    """A `PartitionSpec`, or a sequence of the same entries, as data.

    Raises ConstraintError where an entry is neither None, a name, several names, a number of slices, nor UNCONSTRAINED.
    """
    if isinstance(spec, (str, bytes)) or not isinstance(spec, (PartitionSpec, Sequence)):
        raise ConstraintError(f"{spec!r} is no specification: give a jax.sharding.PartitionSpec, such as P('device', None)")
    return Wanted(tuple(_entry(e, spec) for e in spec))


def _entry(given: Any, spec: Any) -> Entry:
    if given is None:
        return ()
    if given is PartitionSpec.UNCONSTRAINED:
        return None
    if isinstance(given, str):
        return (given,)
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    if isinstance(given, (tuple, list)) and all(isinstance(name, str) for name in given):
        return tuple(given)
    raise ConstraintError(
        f"{given!r} in {spec!r} says nothing of a dimension: give None (whole), names of axes or levels, a number of slices, or"
        " PartitionSpec.UNCONSTRAINED (anything)"
    )


def _entry_text(entry: Entry) -> str:
    if entry is None:
        return "UNCONSTRAINED"
    if isinstance(entry, int):
        return str(entry)
    return "None" if not entry else repr(entry[0]) if len(entry) == 1 else repr(entry)


def axes_of(name: str, names: Names) -> tuple[int, ...]:
    """The axes that a name means. Raises ConstraintError, with the names that there are, if it is none."""
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConstraintError(f"{name!r} is no level or axis of this machine: it has {', '.join(names)}{hint}")
    return names[name]


def met(slices: Slices, type_: Type, axes: Sequence[Axis]) -> bool:
    """Whether a type is as wanted: every dimension in slices that follow each other, nested in the order of the mesh, or for a
    number of slices in any order."""
    places = digits(type_, axes)
    for dim, want in enumerate(slices):
        starts = {k: d.outer for k, d in enumerate(places) if d is not None and d.dim == dim}
        if want is None:
            continue
        if isinstance(want, int):
            if prod(axes[k].size for k in starts) != want or any(start * axes[k].size > want for k, start in starts.items()):
                return False
        elif starts != {k: prod(axes[j].size for j in want if j < k) for k in want}:
            return False
    return True


def degree(want: frozenset[int] | int | None, axes: Sequence[Axis]) -> int:
    """Into how many slices a dimension is wanted to be cut (one, where that is left open)."""
    return 1 if want is None else want if isinstance(want, int) else prod(axes[k].size for k in want)
