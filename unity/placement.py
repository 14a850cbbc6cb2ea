"""A plan's arguments, placed as it wants them: whole in every process, or each process's part."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding

from unity.exec.hosts.place import check_whole, is_global, place, place_parts
from unity.exec.hosts.talk import several
from unity.pcg.errors import PlanError


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the leaves of a function's arguments lie. Remembers what several processes have compared and what the user was told."""

    name: str  # of the function
    tree: Any  # the structure of its arguments
    paths: tuple[str, ...]  # of every leaf
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[NamedSharding, ...]
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
            _check_structure(f"argument {k} of shard", arg, shardings)
        self._compare(jax.tree.leaves(args))
        return tuple(jax.tree.map(place, arg, shardings) for arg, shardings in zip(args, wanted, strict=False))

    def part(self, part: Any, argument: int) -> Any:
        """An argument of which every process has its part."""
        wanted = self.arguments
        if not 0 <= argument < len(wanted):
            raise PlanError(f"{self.name} takes {len(wanted)} arguments, there is no argument {argument} to shard")
        _check_structure(f"argument {argument} of shard_local", part, wanted[argument])
        leaves, tree = jax.tree.flatten(part)
        first = len(jax.tree.leaves(wanted[:argument]))
        own = slice(first, first + len(leaves))
        new = ("part", *self.paths[own]) not in self.known
        placed = place_parts(leaves, self.shapes[own], self.shardings[own], self.paths[own], new)
        self.known.add(("part", *self.paths[own]))
        return jax.tree.unflatten(tree, placed)

    def leaves(self, leaves: Sequence[Any]) -> list:
        """All leaves. Those that lie elsewhere are moved, at a cost that the user should know of."""
        if not all(map(is_global, leaves)):
            self._compare(leaves)
        moved, placed = 0, []
        for x, sharding in zip(leaves, self.shardings, strict=True):
            here = isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim)
            moved += 0 if here else 1
            placed.append(x if here else place(x, sharding))
        if moved and self.shardings[0].mesh.size > 1 and ("told",) not in self.known:
            self.known.add(("told",))
            warnings.warn(
                f"{moved} of {len(leaves)} arrays are not placed as the plan wants them, and are moved at every call;"
                " place them once with plan.shard(...)",
                stacklevel=3,
            )
        return placed

    def _compare(self, leaves: Sequence[Any]) -> None:
        """The first leaves must be the same in all processes. Compared the first time."""
        paths = self.paths[: len(leaves)]
        if several() and ("whole", *paths) not in self.known:
            check_whole(leaves, paths)
            self.known.add(("whole", *paths))


def _check_structure(what: str, given: Any, planned: Any) -> None:
    if jax.tree.structure(given) != jax.tree.structure(planned):
        raise PlanError(
            f"{what} has the structure {jax.tree.structure(given)}, but the plan was made for {jax.tree.structure(planned)}"
        )
