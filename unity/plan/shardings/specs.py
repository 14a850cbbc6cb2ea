"""A plan's shardings in JAX's words, without devices: partition specifications over a mesh with few, named axes.

A plan's own mesh has an axis for every prime factor of the machine's levels. Here, a level whose axes divide the same dimension
of every argument and result is one axis with the level's name: four nodes of eight devices are `{"node": 4, "device": 8}`.
Any other level is in the parts that all texts about the plan name (`unity.pcg.parallel.axis_names`): `{"node": 4, "device_a": 4,
"device_b": 2}` where two parts of a node's devices divide different dimensions of some weight. A specification can be passed to
`unity.pin`, with `mesh=plan.mesh_shape` if a level is in parts. A plan for a mesh of the user's has that mesh's axes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from unity.base.errors import PlanError
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.types.axis import LevelPart
from unity.pcg.types.parallel_type import Shape, Type
from unity.plan.shardings.following_shardings import names_of

SpecRules: TypeAlias = tuple[tuple[str, PartitionSpec], ...]  # regular expressions of paths, and the specifications of their leaves


@dataclass(frozen=True)
class Boundary:
    """The arguments and results of a program, with their types.

    Attributes:
        names: the names of mesh axes that users see.
        types: the type of each array.
        shapes: the shape of each array.
        default: the mesh of a plan without axes: all axes of the user's mesh, or one device.
    """

    names: AxisNames
    types: tuple[Type, ...]
    shapes: tuple[Shape, ...]
    default: Mapping[str, int]

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The names and sizes of the mesh axes, outermost first. One device is one axis of size 1."""
        if not self.names.levels:
            return dict(self.default)
        axes = self.names.axes
        return {name: prod(axes[k].size for k in group) for name, group in self._named().items()} or dict(self.default)

    @property
    def mesh(self) -> AbstractMesh:
        """A mesh of these axes, without devices."""
        shape = self.mesh_shape
        return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        """The partition specification of each array, over the mesh axes, without trailing entries for whole dimensions."""
        named = self._named()
        return tuple(_spec(type_, len(shape), named) for type_, shape in zip(self.types, self.shapes, strict=True))

    def merged(self, spec: PartitionSpec) -> PartitionSpec:
        """Return a specification over the axes of prime size as one over the mesh axes. It divides by whole groups of them."""
        first = {self.names.axes[group[0]].name: name for name, group in self._named().items()}

        def entry(names: Any) -> Any:
            if names is None or names is PartitionSpec.UNCONSTRAINED:
                return names
            own = tuple(first[n] for n in ((names,) if isinstance(names, str) else names) if n in first)
            return own[0] if len(own) == 1 else own

        return _trimmed([entry(names) for names in spec])

    def _named(self) -> Mapping[str, tuple[int, ...]]:
        """Return the axes of the search, by position, that each mesh axis is made of."""
        whole = AxisNames(self.names.axes, self.names.levels).telling_apart(self.types)
        in_parts = {axis.level for axis in whole.shown if isinstance(axis, LevelPart)}
        chosen = [(axis.name, group) for axis, group in zip(whole.shown, whole.groups, strict=True) if axis.level not in in_parts]
        parts = zip(self.names.shown, self.names.groups, strict=True)
        return dict(sorted([*chosen, *((a.name, g) for a, g in parts if a.level in in_parts)], key=lambda row: row[1]))


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
