"""A plan's arguments, placed as it wants them: whole in every process, or each process's part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.core
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from unity.base.errors import PlanError
from unity.base.processes import several
from unity.exec.hosts.arrays import check_whole, in_rows, is_global, place, place_parts
from unity.pcg.capture.packed_arguments import NOTHING, Packing
from unity.plan.call_arguments import differences, refuse_others


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the leaves of a function's arguments lie. Remembers what several processes have compared and what the user was told."""

    name: str  # of the function
    tree: Any  # the structure of its arguments
    paths: tuple[str, ...]  # of every leaf
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[NamedSharding, ...]
    packing: Packing = NOTHING
    known: set[tuple[str, ...]] = field(default_factory=set)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """A tuple of pytrees of shardings, one for each argument."""
        return jax.tree.unflatten(self.tree, self.shardings)

    def whole(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The first arguments, of which every process has the whole."""
        wanted = self.arguments
        if not 0 < len(args) <= len(wanted):
            raise PlanError(f"{self.name} takes {len(wanted)} arguments, shard was given {len(args)}")
        for k, (arg, shardings) in enumerate(zip(args, wanted, strict=False)):
            _check_structure(f"argument {k} of shard", arg, shardings, f"args[{k}]")
        leaves = jax.tree.leaves(args)
        self._compare(leaves)
        given = zip(self.paths, self.shapes, map(np.shape, leaves), strict=False)
        refuse_others(
            f"shard is given other shapes than {self.name} was planned for",
            [f"{path}: planned for {list(planned)}, given {list(shape)}" for path, planned, shape in given if shape != planned],
        )
        return tuple(jax.tree.map(place, arg, shardings) for arg, shardings in zip(args, wanted, strict=False))

    def part(self, part: Any, argument: int) -> Any:
        """An argument of which every process has its part."""
        wanted = self.arguments
        if not 0 <= argument < len(wanted):
            raise PlanError(f"{self.name} takes {len(wanted)} arguments, there is no argument {argument} to shard")
        _check_structure(f"argument {argument} of shard_local", part, wanted[argument], f"args[{argument}]")
        leaves, tree = jax.tree.flatten(part)
        first = len(jax.tree.leaves(wanted[:argument]))
        own = slice(first, first + len(leaves))
        leaves = self.packing.pack(self._in_rows(leaves, first), first)
        new = ("part", *self.paths[own]) not in self.known
        placed = place_parts(leaves, self.shapes[own], self.shardings[own], self.paths[own], new)
        self.known.add(("part", *self.paths[own]))
        return jax.tree.unflatten(tree, placed)

    def unpacked(self, tree: Any, argument: int) -> Any:
        """A tree, every part of it that has an argument's structure as the function has that."""
        return self._changed(tree, argument, self.packing.unpack)

    def packed(self, tree: Any, argument: int) -> Any:
        """A tree, every part of it that has an argument's structure as the plan has that."""
        return self._changed(tree, argument, self.packing.pack)

    def _changed(self, tree: Any, argument: int, change: Callable[[Sequence[Any], int], list[Any]]) -> Any:
        numbers = jax.tree.unflatten(self.tree, list(range(len(self.paths))))[argument]
        wanted, first = jax.tree.structure(numbers), min(jax.tree.leaves(numbers), default=0)

        def one(part: Any) -> Any:
            leaves, structure = jax.tree.flatten(part)
            return jax.tree.unflatten(structure, change(leaves, first)) if structure == wanted and self.packing else part

        return jax.tree.map(one, tree, is_leaf=lambda part: jax.tree.structure(part) == wanted)

    def _in_rows(self, leaves: Sequence[Any], first: int) -> list[Any]:
        """The leaves, those that are to be packed made one array of all processes each, its rows on all devices."""
        found, shapes = list(leaves), self.packing.shapes
        numbers = [k for k, x in enumerate(leaves, first) if k in shapes and np.shape(x) != self.shapes[k]]
        for s in self.packing.slots:
            here = [k for k in (s.first, *s.others) if k in numbers]
            if here and len(here) <= len(s.others):
                raise PlanError(
                    f"{self.paths[here[0]]} is packed with weights of another argument, so it cannot be placed without that: give"
                    " both whole to plan.shard. (docs: branches#weights-where-they-are-used)"
                )
        if numbers:
            wanted = [shapes[k] for k in numbers]
            rows, paths = [in_rows(shape, self.shardings[0].mesh) for shape in wanted], [self.paths[k] for k in numbers]
            placed = place_parts([leaves[k - first] for k in numbers], wanted, rows, paths, True)
            for k, x in zip(numbers, placed, strict=True):
                found[k - first] = x
        return found

    def leaves(self, leaves: Sequence[Any], depth: int = 3) -> list:
        """Returns all leaves, those that lie elsewhere moved, at a cost that the user should know of.

        A leaf that is differentiated is moved too, and its gradient back to where the leaf lies. A leaf that `jax.jit` traces
        stays: JAX does not say where it lies.

        Args:
            leaves: arrays, or what JAX's transformations make of them.
            depth: the user's line, as `warnings.warn` counts.
        """
        values = [lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x for x in leaves]
        known = [not isinstance(value, jax.core.Tracer) for value in values]
        if all(known) and not all(map(is_global, values)):
            self._compare(values)
        moved, placed = 0, []
        for x, value, sharding, concrete in zip(leaves, values, self.shardings, known, strict=True):
            here = not concrete or (isinstance(value, jax.Array) and value.sharding.is_equivalent_to(sharding, value.ndim))
            moved += 0 if here else 1
            placed.append(x if here else _moved(x, value, sharding))
        if moved and self.shardings[0].mesh.size > 1 and ("told",) not in self.known:
            self.known.add(("told",))
            warnings.warn(
                f"{moved} of {len(leaves)} arrays are not placed as the plan wants them, and are moved at every call;"
                " place them once with plan.shard(...)",
                stacklevel=depth,
            )
        return placed

    def _compare(self, leaves: Sequence[Any]) -> None:
        """The first leaves must be the same in all processes. Compared the first time."""
        paths = self.paths[: len(leaves)]
        if several() and ("whole", *paths) not in self.known:
            check_whole(leaves, paths)
            self.known.add(("whole", *paths))


def _moved(x: Any, value: Any, sharding: NamedSharding) -> Any:
    """Returns a leaf where the plan wants it; `value` is what JAX's transformations have made `x` of."""
    if x is not value:  # its gradient goes back; what is numpy's lies nowhere
        return jax.device_put(x, sharding, src=value.sharding if isinstance(value, jax.Array) else None)
    with jax.ensure_compile_time_eval():  # closed over by a function that is jitted, it is moved while that is traced
        return place(x, sharding)


def _check_structure(what: str, given: Any, planned: Any, at: str) -> None:
    refuse_others(f"{what} has another structure than it was planned for", list(differences(planned, given, at)))
