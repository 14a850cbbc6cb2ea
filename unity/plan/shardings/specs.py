"""A plan's shardings in JAX's words, without devices: partition specifications over a mesh with few, named axes.

A plan's own mesh has an axis for every prime factor of the machine's levels. Here, axes of one level that divide the same dimension
of every argument and result are merged into one axis with the level's name: four nodes of eight devices are
`{"node": 4, "device": 8}`, and `{"node": 4, "device_a": 4, "device_b": 2}` where two parts of a node's devices divide different
dimensions of some weight. A specification can be passed to `unity.pin`, with `mesh=plan.mesh_shape` if a level is in parts. A plan
for a mesh of the user's has that mesh's axes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from unity.base.errors import PlanError
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Shape, State, Type
from unity.plan.shardings.following_shardings import names_of

SpecRules: TypeAlias = tuple[tuple[str, PartitionSpec], ...]  # regular expressions of paths, and the specifications of their leaves


@dataclass(frozen=True)
class Boundary:
    """The arguments and results of a program, with their types.

    Attributes:
        axes: the axes of prime size, or of the user's mesh.
        levels: the names of the machine's levels, outermost first.
        types: the type of each array.
        shapes: the shape of each array.
        user_mesh: the names and sizes of all axes of the user's mesh, if planned for one.
    """

    axes: tuple[Axis, ...]
    levels: tuple[str, ...]
    types: tuple[Type, ...]
    shapes: tuple[Shape, ...]
    user_mesh: Mapping[str, int] = field(default_factory=dict)

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The names and sizes of the merged axes, outermost first. One device is one axis of size 1."""
        if self.user_mesh:
            return dict(self.user_mesh)
        sizes = {name: prod(self.axes[k].size for k in group) for name, group in self._named().items()}
        return sizes or {self.levels[-1]: 1}

    @property
    def mesh(self) -> AbstractMesh:
        """A mesh of the merged axes, without devices."""
        shape = self.mesh_shape
        return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        """The partition specification of each array, over the merged axes, without trailing entries for whole dimensions."""
        named = self._named()
        return tuple(_spec(type_, len(shape), named) for type_, shape in zip(self.types, self.shapes, strict=True))

    def merged(self, spec: PartitionSpec) -> PartitionSpec:
        """Return a specification over the axes of prime size as one over the merged axes. It divides by whole groups of them."""
        first = {self.axes[group[0]].name: name for name, group in self._named().items()}

        def entry(names: Any) -> Any:
            if names is None or names is PartitionSpec.UNCONSTRAINED:
                return names
            own = tuple(first[n] for n in ((names,) if isinstance(names, str) else names) if n in first)
            return own[0] if len(own) == 1 else own

        return _trimmed([entry(names) for names in spec])

    def _groups(self) -> list[tuple[int, ...]]:
        """Return groups of axes, by number: neighbours on one level that are in the same state in every type."""
        groups: list[tuple[int, ...]] = []
        for k in range(len(self.axes)):
            last = groups[-1][-1] if groups else None
            if last is not None and self.axes[last].level == self.axes[k].level and self._states(last) == self._states(k):
                groups[-1] = (*groups[-1], k)
            else:
                groups.append((k,))
        return groups

    def _states(self, k: int) -> tuple[State, ...]:
        return tuple(type_[k] for type_ in self.types)

    def _named(self) -> Mapping[str, tuple[int, ...]]:
        """Return the groups by name: the level's name, with a letter if the level has several groups."""
        if self.user_mesh:
            return {axis.name: (k,) for k, axis in enumerate(self.axes)}
        groups = self._groups()
        names = [self.levels[self.axes[group[0]].level] for group in groups]
        letters = {name: iter("abcdefghijklmnopqrstuvwxyz") for name in names if names.count(name) > 1}
        return {f"{name}_{next(letters[name])}" if name in letters else name: g for name, g in zip(names, groups, strict=True)}


def _spec(type_: Type, rank: int, named: Mapping[str, tuple[int, ...]]) -> PartitionSpec:
    dims: list[list[str]] = [[] for _ in range(rank)]
    for name, group in named.items():
        state = type_[group[0]]
        if state.kind == "P":
            dims[state.dim].append(name)
    return _trimmed([tuple(names) if len(names) > 1 else names[0] if names else None for names in dims])


def _trimmed(entries: list[Any]) -> PartitionSpec:
    """Return a partition specification without trailing entries for whole dimensions."""
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def rules(specs: Any) -> SpecRules:
    """Return regular expressions of paths with their specifications, for `re.search`; the first that matches counts.

    A path is a leaf's keys joined by slashes, `layers/3/attention/query`. Leaves whose paths differ only in numbers share a rule if
    they have the same specification. Raises PlanError if two leaves have one path and different specifications.
    """
    leaves, _ = jax.tree.flatten_with_path(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    by_path: dict[str, PartitionSpec] = {}
    for keys, spec in leaves:
        path = "/".join(names_of(keys))
        if by_path.setdefault(path, spec) != spec:
            raise PlanError(
                f"no rule tells two leaves with the path {path} apart, which have the specifications {by_path[path]} and {spec}:"
                " rename one, or use plan.in_specs. (docs: plan#specifications-without-devices)"
            )
    alike: dict[str, set[PartitionSpec]] = {}
    for path, spec in by_path.items():
        alike.setdefault(_without_numbers(path), set()).add(spec)
    exact = {f"^{re.escape(path)}$": spec for path, spec in by_path.items() if len(alike[_without_numbers(path)]) > 1}
    shared = {pattern: specs.pop() for pattern, specs in alike.items() if len(specs) == 1}
    return (*exact.items(), *shared.items())


def _without_numbers(path: str) -> str:
    return f"^{re.sub(r'[0-9]+', '[0-9]+', re.escape(path))}$"
