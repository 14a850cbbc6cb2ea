"""A plan's specifications as rules from logical axis names to mesh axes, which Flax, MaxText and t5x take.

Such code bases name the dimensions of each weight ("embed", "mlp") and have one list of rules for all of them. A rule applies to a
dimension if no earlier rule has decided it, and if no other dimension of the weight uses one of its mesh axes
(`flax.linen.logical_to_mesh_axes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec

from unity.base.errors import PlanError

MeshAxes: TypeAlias = str | tuple[str, ...] | None
LogicalRules: TypeAlias = tuple[tuple[str, MeshAxes], ...]  # logical names and the mesh axes that divide their dimensions, in order


def logical_rules(specs: Any, names: Any) -> LogicalRules:
    """Return the rules by which named dimensions have their specifications.

    Args:
        specs: a pytree of `PartitionSpec`, one for each leaf of an argument.
        names: the logical names of each leaf's dimensions, None for a dimension without: a pytree of tuples, of lists or of
            `PartitionSpec`, as `flax.linen.get_partition_spec` returns it.

    Raises:
        PlanError: `names` has another structure, or no list of rules leads to the specifications.
    """
    leaves = jax.tree.leaves_with_path(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    named = jax.tree.leaves_with_path(names, is_leaf=_is_named)
    paths, named_paths = ([jax.tree_util.keystr(path) for path, _ in side] for side in (leaves, named))
    if paths != named_paths:
        single = next((path for path in (*paths, *named_paths) if (path in paths) != (path in named_paths)), "their order")
        raise PlanError(
            f"names: expected the structure of the argument, with {len(leaves)} leaves such as ('embed', None), got {len(named)};"
            f" the first difference is {single}. (docs: plan#logical-axis-rules)"
        )
    entries: dict[str, Counter[MeshAxes]] = {}
    for (_, spec), (_, dimensions) in zip(leaves, named, strict=True):
        for k, name in enumerate(dimensions):
            if name is not None:
                entries.setdefault(name, Counter())[_entry(spec, k)] += 1
    rules = tuple(
        (name, axes) for name, counts in entries.items() for axes in sorted(counts, key=lambda a: (a is None, -counts[a]))
    )
    for (path, spec), (_, dimensions) in zip(leaves, named, strict=True):
        _check(jax.tree_util.keystr(path), spec, tuple(dimensions), rules)
    return rules


def _is_named(x: Any) -> bool:
    return isinstance(x, PartitionSpec) or (
        isinstance(x, tuple | list) and all(name is None or isinstance(name, str) for name in x)
    )


def _entry(spec: PartitionSpec, dimension: int) -> MeshAxes:
    """Return the mesh axes of a dimension. Trailing ones without axes may be left out of a specification."""
    return spec[dimension] if dimension < len(spec) else None


def _check(path: str, spec: PartitionSpec, dimensions: Sequence[str | None], rules: LogicalRules) -> None:
    """Raise PlanError unless the rules lead to the specification of a leaf with named dimensions."""
    decided: dict[int, MeshAxes] = {}
    for name, axes in rules:
        if (
            name in dimensions
            and (k := dimensions.index(name)) not in decided
            and not _flat(axes) & set().union(*map(_flat, decided.values()))
        ):
            decided[k] = axes
    ruled = [decided.get(k) for k in range(max(len(dimensions), len(spec)))]
    if ruled != [_entry(spec, k) for k in range(len(ruled))]:
        raise PlanError(
            f"no list of rules divides all dimensions of one name alike: {path} {tuple(dimensions)} has {spec}, and would have"
            f" {PartitionSpec(*ruled)}. Give its dimensions names of their own, or use inspect.spec_rules or in_specs."
            " (docs: plan#logical-axis-rules)"
        )


def _flat(axes: MeshAxes) -> set[str]:
    return set() if axes is None else {axes} if isinstance(axes, str) else set(axes)
