"""Constraints from the shardings that a program states for the user's own mesh (`unity.keep_shardings()`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from unity.base.errors import ConstraintError
from unity.constraints.kinds import Pin
from unity.machine.machine import Machine
from unity.pcg.jaxprs.shardings import Mark, Marking
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.parallel.marks import mark
from unity.pcg.parallel.sharding_spec import Entry, ShardingSpec
from unity.pcg.types.mesh_axes import mesh_axes


def marking(machine: Machine) -> Marking:
    """Return the function that converts a stated sharding to the mark that `unity.constrain` would make for a machine.

    It returns None for a sharding that leaves all dimensions open, and for one of partial sums.
    """

    def marked(sharding: NamedSharding, open_dims: frozenset[int], rank: int) -> Mark | None:
        entries = () if sharding.spec.unreduced else entries_of(sharding, open_dims, rank, machine)
        return None if all(e is None for e in entries) else mark(entries)

    return marked


def pins(paths: Sequence[str], leaves: Sequence[Any], machine: Machine) -> tuple[Pin, ...]:
    """Return a pin for every argument with a `NamedSharding`, by its type or by its placement, but for partial sums."""
    constraints = list[Pin]()
    for path, x in zip(paths, leaves, strict=True):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.spec.unreduced:
            rank = len(x.shape)
            constraints.append(Pin(path, ShardingSpec(entries_of(sharding, frozenset(), rank, machine))))
    return tuple(constraints)


def entries_of(sharding: NamedSharding, open_dims: frozenset[int], rank: int, machine: Machine) -> tuple[Entry, ...]:
    """Return a sharding as the entries of a constraint, in the names of the machine's axes.

    Args:
        sharding: a sharding over the axes of the user's mesh.
        open_dims: the dimensions that it leaves open.
        rank: the rank of the value.
        machine: the machine that is planned for.

    Raises:
        ConstraintError: the mesh is not of the size of the machine, or its axes cannot be made of the machine's.
    """
    sizes = dict(sharding.mesh.shape)
    names = mesh_axes(sizes, machine.axes)
    if names is None:
        mesh = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        shown = AxisNames.of(machine.axes, machine.named_levels, ()).shown
        levels = ", ".join(f"{axis.name}: {axis.size}" for axis in shown)
        raise ConstraintError(
            f"unity.keep_shardings(): the mesh ({mesh}) does not fit the axes of {machine.name} ({levels or 'one device'}),"
            " matched by size from the outermost inwards.\n    Plan under a mesh of the machine's devices"
            " (jax.sharding.use_abstract_mesh needs none of them), or leave it out. (docs: constraints#shardings-of-your-own)"
        )
    entries = list[Entry]()
    stated = sharding.spec.partitions
    for dim, entry in enumerate((*stated, *(None,) * (rank - len(stated)))):
        over = (entry,) if isinstance(entry, str) else tuple(entry or ()) if entry is not PartitionSpec.UNCONSTRAINED else ()
        is_open = entry is PartitionSpec.UNCONSTRAINED or dim in open_dims
        entries.append(None if is_open else tuple(machine.axes[k].name for name in over for k in names[name]))
    return tuple(entries)
