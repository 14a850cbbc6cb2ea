"""A sharding that a user asks for: a `PartitionSpec` as data, whose names are axes of the mesh or levels of the machine."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from math import prod
from string import ascii_lowercase
from typing import Any

from jax.sharding import PartitionSpec

from unity.base.documents import Positive, Record
from unity.base.errors import ConstraintError
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Type, digits

# The constraint on one dimension: the axes or levels that slice it (none: it is whole), a number of slices over any axes, or None.
Entry = tuple[str, ...] | Positive | None
Slices = tuple[frozenset[int] | int | None, ...]  # the constraints on all dimensions, with axes by position
Names = Mapping[str, tuple[int, ...]]  # from the names of axes and levels to the positions of their axes
PART = ":"  # in the name of a part of a level, `device:4:8`: the axes between the first 4 parts of the level and its first 8
_PART_NAME = re.compile(rf"(.+){PART}([1-9]\d*){PART}([1-9]\d*)")


class ShardingSpec(Record):
    """A `PartitionSpec` as plain data. Dimensions after the last entry are whole."""

    entries: tuple[Entry, ...]

    def slices(self, rank: int, names: Names) -> Slices:
        """Return the constraint on every dimension of a tensor of this rank, with the names of a mesh resolved.

        Raises:
            ConstraintError: there are more entries than dimensions, a name is unknown, or an axis occurs twice.
        """
        if len(self.entries) > rank:
            raise ConstraintError(f"{self} has {len(self.entries)} entries, for a tensor of {rank} dimensions")
        used: list[int] = []
        slices: list[frozenset[int] | int | None] = []
        for entry in (*self.entries, *((),) * (rank - len(self.entries))):
            if isinstance(entry, tuple):
                axes = [k for name in entry for k in axes_of(name, names)]
                if len(axes) == len(set(axes)) and any(a > b for a, b in pairwise(axes)):
                    order = self._spelled(tuple(sorted(entry, key=lambda name: names[name])))
                    raise ConstraintError(f"{self}: slices nest in the order of the mesh, outermost first: write {order}")
                used += axes
                slices.append(frozenset(axes))
            else:
                slices.append(entry)
        if len(used) > len(set(used)):
            raise ConstraintError(f"{self}: an axis can slice a tensor only once")
        return tuple(slices)

    def over(self, names: AxisNames) -> ShardingSpec:
        """Return the specification with the names that users see in place of those of axes of prime size."""
        inner = {axis.name for axis in names.axes} if names.levels else set[str]()
        entries = list[Entry]()
        for entry in self.entries:
            if isinstance(entry, tuple) and inner.intersection(entry):
                runs = [(is_inner, tuple(run)) for is_inner, run in groupby(entry, inner.__contains__)]
                own = (names.names_of(names.positions(run)) if is_inner else run for is_inner, run in runs)
                entry = tuple(name for run in own for name in run)
            entries.append(entry)
        return ShardingSpec(tuple(entries))

    @property
    def mesh(self) -> dict[str, int]:
        """The smallest mesh whose axes are the parts of levels in the entries, as `sharding_spec` takes it; empty without parts."""
        cuts: dict[str, set[int]] = {}
        for part in (_PART_NAME.fullmatch(name) for entry in self.entries if isinstance(entry, tuple) for name in entry):
            if part is not None:
                cuts.setdefault(part[1], {1}).update((int(part[2]), int(part[3])))
        return {
            f"{level}_{letter}": stop // start
            for level, numbers in cuts.items()
            for letter, (start, stop) in zip(ascii_lowercase, pairwise(sorted(numbers)), strict=False)
        }

    def _spelled(self, entry: Entry) -> Entry:
        """Return an entry with parts of levels as axes of `mesh`."""
        axes = {part: axis for axis, part in part_names(self.mesh).items()}
        return tuple(axes.get(name, name) for name in entry) if isinstance(entry, tuple) else entry

    def __str__(self) -> str:
        entries = ", ".join(_entry_text(self._spelled(entry)) for entry in self.entries)
        return f"P({entries}){f', mesh={self.mesh}' if self.mesh else ''}"


def sharding_spec(spec: Any, mesh: Any = None) -> ShardingSpec:
    """Return a `PartitionSpec`, or a sequence of such entries, as plain data.

    Args:
        spec: the specification.
        mesh: the mesh of the plan that printed it, or the names and sizes of its axes. Parts of levels are then replaced by names
            that do not depend on the plan.

    Raises:
        ConstraintError: an entry is neither None, a name, several names, a number of slices, nor UNCONSTRAINED.
    """
    if isinstance(spec, (str, bytes)) or not isinstance(spec, (PartitionSpec, Sequence)):
        raise ConstraintError(f"{spec!r} is no specification: give a jax.sharding.PartitionSpec, such as P('device', None)")
    parts = {} if mesh is None else part_names(getattr(mesh, "shape", mesh))
    entries = [_entry(e, spec) for e in spec]
    return ShardingSpec(tuple(tuple(parts.get(n, n) for n in e) if isinstance(e, tuple) else e for e in entries))


def part_names(mesh: Mapping[str, int]) -> dict[str, str]:
    """Return names that do not depend on a plan for the axes of its mesh that are parts of levels.

    Args:
        mesh: the names and sizes of the mesh axes, outermost first, as in `plan.mesh_shape`. The axes `device_a` and `device_b` are
            consecutive parts of the level `device`.
    """
    before: dict[str, int] = {}
    parts: dict[str, str] = {}
    for name, size in mesh.items():
        level, _, letter = name.rpartition("_")
        if level and len(letter) == 1:
            start = before.get(level, 1)
            before[level] = start * size
            parts[name] = f"{level}{PART}{start}{PART}{start * size}"
    return parts


def _entry(entry: Any, spec: Any) -> Entry:
    if entry is None:
        return ()
    if entry is PartitionSpec.UNCONSTRAINED:
        return None
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, int) and not isinstance(entry, bool) and entry > 0:
        return entry
    if isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in entry):
        return tuple(entry)
    raise ConstraintError(
        f"{entry!r} in {spec!r} says nothing of a dimension: give None (whole), names of axes or levels, a number of slices, or"
        " PartitionSpec.UNCONSTRAINED (anything)"
    )


def _entry_text(entry: Entry) -> str:
    if entry is None:
        return "UNCONSTRAINED"
    if isinstance(entry, int):
        return str(entry)
    return "None" if not entry else repr(entry[0]) if len(entry) == 1 else repr(entry)


def axes_of(name: str, names: Names) -> tuple[int, ...]:
    """Return the axes, by position, of an axis or a level. Raises ConstraintError, with the available names, for any other name."""
    if name not in names:
        level, _, letter = name.rpartition("_")
        if level in names and len(letter) == 1:
            raise ConstraintError(
                f"{name!r} is a part of {level!r} in one plan's mesh, where its size depends on the plan: give that mesh to"
                f" unity.pin or unity.constrain, mesh=plan.mesh_shape, or the sizes of the parts that you mean, outermost first,"
                f" such as mesh={{'{level}_a': 2, '{level}_b': 4}}. (docs: constraints#paths)"
            )
        shown = [n for n in names if PART not in n and not _is_inner(n, names)]
        near = difflib.get_close_matches(name, shown, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(shown)
        if part := _PART_NAME.fullmatch(name):
            raise ConstraintError(f"no axes of this machine cut {part[1]!r} from {part[2]} into {part[3]} slices: it has {known}")
        raise ConstraintError(f"{name!r} is no level or axis of this machine: it has {known}{hint}")
    return names[name]


def _is_inner(name: str, names: Names) -> bool:
    """Return whether a name is that of an axis of prime size, which is a part of a level too, and not the user's."""
    return bool(re.fullmatch(r"[a-z]\d+", name)) and any(PART in n and n[0] == name[0] and names[n] == names[name] for n in names)


def satisfies(slices: Slices, type_: Type, axes: Sequence[Axis]) -> bool:
    """Return whether a type satisfies the constraints on its dimensions.

    The slices of a dimension must be contiguous: nested in the order of the mesh for given axes, in any order for a number.
    """
    places = digits(type_, axes)
    for dim, slicing in enumerate(slices):
        starts = {k: d.outer for k, d in enumerate(places) if d is not None and d.dim == dim}
        if slicing is None:
            continue
        if isinstance(slicing, int):
            count = prod(axes[k].size for k in starts)
            if count != slicing or any(start * axes[k].size > slicing for k, start in starts.items()):
                return False
        elif starts != {k: prod(axes[j].size for j in slicing if j < k) for k in slicing}:
            return False
    return True


def degree(slicing: frozenset[int] | int | None, axes: Sequence[Axis]) -> int:
    """Return the number of slices that a constraint on a dimension requires: 1 if it leaves the dimension open."""
    return 1 if slicing is None else slicing if isinstance(slicing, int) else prod(axes[k].size for k in slicing)
