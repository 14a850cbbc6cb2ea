"""Placement of a plan's arguments on its devices, from whole arrays in every process or from each process's part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from unity.base.errors import PlanError
from unity.base.processes import shared
from unity.exec.context import explicit_mesh
from unity.exec.hosts.arrays import check_whole, in_rows, is_global, place, place_parts
from unity.pcg.capture.packed_arguments import NOTHING, Packing
from unity.plan.call_arguments import differences, refuse_no_arrays, refuse_others


@dataclass(frozen=True, eq=False)
class Placement:
    """Shardings of the leaves of a function's arguments.

    The one mutable field, `done`, records the comparisons between processes and the warnings that need not be repeated.
    """

    name: str  # of the function
    tree: Any  # the structure of its arguments
    paths: tuple[str, ...]  # of every leaf
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[NamedSharding, ...]
    packing: Packing = NOTHING
    done: set[tuple[str, ...]] = field(default_factory=set)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """A tuple of pytrees of shardings, one for each argument."""
        return jax.tree.unflatten(self.tree, self.shardings)

    def whole(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Place the function's first arguments, each of which every process has as a whole.

        An array that occurs twice is copied, so that either may be donated.
        """
        planned = self.arguments
        if not 0 < len(args) <= len(planned):
            raise PlanError(
                f"{self.name} takes {len(planned)} arguments, but shard got {len(args)}: pass all of them, or the first ones"
            )
        for k, (arg, shardings) in enumerate(zip(args, planned, strict=False)):
            _check_structure(f"argument {k} of shard", arg, shardings, f"args[{k}]")
        leaves = jax.tree.leaves(args)
        refuse_no_arrays("shard is given an argument that is no array", self.paths, list(map(list, self.shapes)), leaves)
        self._compare(leaves)
        shapes = zip(self.paths, self.shapes, map(np.shape, leaves), strict=False)
        refuse_others(
            f"shard is given other shapes than {self.name} was planned for",
            [f"{path}: planned for {list(old)}, given {list(new)}" for path, old, new in shapes if new != old],
        )
        placed, seen = [], set[int]()
        for x, sharding in zip(leaves, self.shardings, strict=False):
            placed.append(place(jnp.copy(x) if id(x) in seen and isinstance(x, jax.Array) else x, sharding))
            seen.add(id(x))
        return jax.tree.unflatten(jax.tree.structure(args), placed)

    def part(self, part: Any, argument: int) -> Any:
        """Place the argument of the given number, of which every process has its part."""
        planned = self.arguments
        if not 0 <= argument < len(planned):
            raise PlanError(f"argument={argument}: there is no argument {argument} of {self.name}, which takes {len(planned)}")
        _check_structure(f"argument {argument} of shard.local", part, planned[argument], f"args[{argument}]")
        leaves, tree = jax.tree.flatten(part)
        first = len(jax.tree.leaves(planned[:argument]))
        own = slice(first, first + len(leaves))
        refuse_no_arrays(
            "shard.local is given an argument that is no array", self.paths[own], list(map(list, self.shapes[own])), leaves
        )
        leaves = self.packing.pack(self._in_rows(leaves, first), first)
        new = ("part", *self.paths[own]) not in self.done
        placed = place_parts(leaves, self.shapes[own], self.shardings[own], self.paths[own], new)
        self.done.add(("part", *self.paths[own]))
        return jax.tree.unflatten(tree, placed)

    def unpacked(self, tree: Any, argument: int) -> Any:
        """Unpack every subtree that has an argument's structure: into weights of the function's own shapes."""
        return self._map_subtrees(tree, argument, self.packing.unpack)

    def packed(self, tree: Any, argument: int) -> Any:
        """Pack every subtree that has an argument's structure: into weights of the plan's shapes."""
        return self._map_subtrees(tree, argument, self.packing.pack)

    def _map_subtrees(self, tree: Any, argument: int, change: Callable[[Sequence[Any], int], list[Any]]) -> Any:
        """Apply `change`, a function of leaves and the number of the first of them, to subtrees with an argument's structure."""
        numbers = jax.tree.unflatten(self.tree, list(range(len(self.paths))))[argument]
        target, first = jax.tree.structure(numbers), min(jax.tree.leaves(numbers), default=0)

        def changed(subtree: Any) -> Any:
            leaves, structure = jax.tree.flatten(subtree)
            return jax.tree.unflatten(structure, change(leaves, first)) if structure == target and self.packing else subtree

        return jax.tree.map(changed, tree, is_leaf=lambda subtree: jax.tree.structure(subtree) == target)

    def _in_rows(self, leaves: Sequence[Any], first: int) -> list[Any]:
        """Return the leaves of one argument, the first of which has the number `first`, ready to be packed.

        Each leaf that will be packed becomes one global array of all processes' parts, with its rows split over all devices.
        """
        arrays, shapes = list(leaves), self.packing.shapes
        numbers = [k for k, x in enumerate(leaves, first) if k in shapes and np.shape(x) != self.shapes[k]]
        for s in self.packing.slots:
            here = [k for k in (s.first, *s.others) if k in numbers]
            if here and len(here) <= len(s.others):
                raise PlanError(
                    f"{self.paths[here[0]]} is packed with weights of another argument, so it cannot be placed without that: give"
                    " both whole to plan.shard. (docs: branches#weights-where-they-are-used)"
                )
        if numbers:
            targets = [shapes[k] for k in numbers]
            rows, paths = [in_rows(shape, self.shardings[0].mesh) for shape in targets], [self.paths[k] for k in numbers]
            placed = place_parts([leaves[k - first] for k in numbers], targets, rows, paths, True)
            for k, x in zip(numbers, placed, strict=True):
                arrays[k - first] = x
        return arrays

    def leaves(self, leaves: Sequence[Any], depth: int = 3) -> list:
        """Return the leaves of all arguments, moving those that are placed otherwise, with a warning, as every call pays for it.

        A leaf that is differentiated is moved too, and its gradient back to the leaf's own placement. A leaf that `jax.jit` traces
        is not moved, as JAX does not tell its placement; nor is any under a mesh with explicit axes that the user has set, whose
        types the gradients have.

        Args:
            leaves: arrays, or tracers of JAX's transformations.
            depth: the stack level of the user's line, as `warnings.warn` counts.
        """
        values = [lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x for x in leaves]
        concrete = [not isinstance(value, jax.core.Tracer) for value in values]
        if all(concrete) and not all(map(is_global, values)):
            self._compare(values)
        if explicit_mesh(()) is not None:
            return list(leaves)
        moved, placed = 0, []
        for x, value, sharding, is_concrete in zip(leaves, values, self.shardings, concrete, strict=True):
            is_placed = not is_concrete or (isinstance(value, jax.Array) and value.sharding.is_equivalent_to(sharding, value.ndim))
            moved += 0 if is_placed else 1
            placed.append(x if is_placed else _moved(x, value, sharding))
        if moved and self.shardings[0].mesh.size > 1 and ("told",) not in self.done:
            self.done.add(("told",))
            warnings.warn(
                f"{moved} of {len(leaves)} arrays are not placed as the plan needs them, and are moved at every call;"
                " place them once with plan.shard(...)",
                stacklevel=depth,
            )
        return placed

    def _compare(self, leaves: Sequence[Any]) -> None:
        """Check, once, that the first leaves are equal in all processes, if these share the devices."""
        paths = self.paths[: len(leaves)]
        if paths and ("whole", *paths) not in self.done and shared(self.shardings[0].device_set):
            check_whole(leaves, paths)
            self.done.add(("whole", *paths))


def _moved(x: Any, value: Any, sharding: NamedSharding) -> Any:
    """Return a leaf with the plan's sharding. `value` is the array behind `x`, which may be a tracer of `jax.grad`."""
    if x is not value:  # `src` is where the gradient goes back to; a NumPy array has no placement
        return jax.device_put(x, sharding, src=value.sharding if isinstance(value, jax.Array) else None)
    with jax.ensure_compile_time_eval():  # a constant of a jitted function is moved while the function is traced
        return place(x, sharding)


def on_devices(x: Any, sharding: NamedSharding) -> Any:
    """Return an array as it is, or with a sharding if it is committed to other devices: JAX then refuses to compute with both."""
    elsewhere = isinstance(x, jax.Array) and x.committed and x.sharding.device_set != sharding.device_set
    return _moved(x, x, sharding) if elsewhere else x


def _check_structure(name: str, tree: Any, planned: Any, at: str) -> None:
    refuse_others(f"{name} has another structure than it was planned for", list(differences(planned, tree, at)))
