"""Constraints from the shardings that a program states for the user's own mesh (`unity.keep_shardings()`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from unity.base.errors import ConstraintError
from unity.base.formatting import short
from unity.constraints.kinds import Pin
from unity.machine.machine import Machine
from unity.pcg.jaxprs.shardings import Mark, Marking
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.parallel.marks import mark
from unity.pcg.parallel.sharding_spec import Entry, ShardingSpec
from unity.pcg.types.mesh_axes import MeshAxes, mesh_axes


def marking(machine: Machine) -> Marking:
    """Return the function that converts a stated sharding to the mark that `unity.constrain` would make for a machine.

    It returns None for a sharding that leaves all dimensions open, and for one of partial sums.
    """

    def marked(sharding: NamedSharding, open_dims: frozenset[int], rank: int, line: str, words: str) -> Mark | None:
        entries = () if sharding.spec.unreduced else entries_of(sharding, open_dims, rank, machine, short(line))
        return None if all(e is None for e in entries) else mark(entries, words.format(_spec_of(sharding)))

    return marked


def pins(paths: Sequence[str], leaves: Sequence[Any], machine: Machine) -> tuple[Pin, ...]:
    """Return a pin for every argument with a `NamedSharding`, by its type or by its placement, but for partial sums."""
    constraints = list[Pin]()
    for path, x in zip(paths, leaves, strict=True):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.spec.unreduced:
            rank = len(x.shape)
            constraints.append(Pin(path, ShardingSpec(entries_of(sharding, frozenset(), rank, machine, path))))
    return tuple(constraints)


def entries_of(sharding: NamedSharding, open_dims: frozenset[int], rank: int, machine: Machine, where: str) -> tuple[Entry, ...]:
    """Return a sharding as the entries of a constraint, in the names of the machine's axes.

    Args:
        sharding: a sharding over the axes of the user's mesh.
        open_dims: the dimensions that it leaves open.
        rank: the rank of the value.
        machine: the machine that is planned for.
        where: the argument or the user's line that has the sharding.

    Raises:
        ConstraintError: the mesh is not of the size of the machine, its axes cannot be made of the machine's, or those of a
            dimension nest in another order than the machine's.
    """
    sizes = dict(sharding.mesh.shape)
    names = mesh_axes(sizes, machine.axes)
    if names is None:
        mesh = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        shown = AxisNames.of(machine.axes, machine.named_levels, ()).shown
        levels = ", ".join(f"{axis.name}: {axis.size}" for axis in shown)
        raise ConstraintError(
            f"unity.keep_shardings(): {where or 'the program'}: the mesh ({mesh}) does not fit the axes of {machine.name}"
            f" ({levels or 'one device'}), matched by size from the outermost inwards.\n"
            "    Plan under a mesh of the machine's devices (jax.sharding.use_abstract_mesh needs none of them),"
            " or leave it out. (docs: constraints#shardings-of-your-own)"
        )
    entries = list[Entry]()
    stated = sharding.spec.partitions
    for dim, entry in enumerate((*stated, *(None,) * (rank - len(stated)))):
        over = None if dim in open_dims else _axes_of(entry)
        if over is not None:
            _check_order(sharding, over, names, where)
        entries.append(None if over is None else tuple(machine.axes[k].name for name in over for k in names[name]))
    return tuple(entries)


def _check_order(sharding: NamedSharding, over: Sequence[str], names: MeshAxes, where: str) -> None:
    """Raise ConstraintError unless the axes that slice a dimension nest in the order of the machine's."""
    ordered = tuple(sorted(over, key=lambda name: names[name]))
    if [k for name in over for k in names[name]] != [k for name in ordered for k in names[name]]:
        raise ConstraintError(
            f"unity.keep_shardings(): {where or 'the program'} has the sharding {_spec_of(sharding)}, but slices of a plan nest in"
            " the order of the devices, outermost first.\n"
            f"    Write {ordered} in the place of {tuple(over)}, or leave that sharding out."
            " (docs: constraints#shardings-of-your-own)"
        )


def _spec_of(sharding: NamedSharding) -> ShardingSpec:
    """Return the specification of a sharding in the names of the user's mesh."""
    return ShardingSpec(tuple(map(_axes_of, sharding.spec.partitions)))


def _axes_of(entry: Any) -> tuple[str, ...] | None:
    """Return the mesh axes of an entry of a specification; None for one that leaves its dimension open."""
    return None if entry is PartitionSpec.UNCONSTRAINED else (entry,) if isinstance(entry, str) else tuple(entry or ())
