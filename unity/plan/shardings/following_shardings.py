"""Shardings for a pytree that mirrors the weights, such as an optimizer's state, whose moments are sharded like the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np

T = TypeVar("T")
KeyNames: TypeAlias = tuple[str, ...]  # of the keys on the path to a leaf
Weights: TypeAlias = Mapping[KeyNames, tuple[tuple[int, ...], T]]  # the shape of each weight, and its sharding or its number


HOST = "pinned_host"  # the kind of memory of a host that devices copy from and to


def following(tree: Any, weights: Weights[T], rest: T, themselves: Weights[T] | None = None) -> Any:
    """Return a tree with the sharding, or the number, of the weight that each leaf follows. Leaves may be `jax.ShapeDtypeStruct`s.

    A leaf follows a weight if its path ends with the weight's path and their shapes are equal: `state[0].mu["w"]` follows
    `params["w"]`. This holds for optimizers of some of the weights, too. All other leaves (counts, factored moments) get `rest`.
    If the weights have other shardings than the leaves that follow them, these are `themselves`: a weight's path is the leaf's.
    """

    def followed(path: tuple[Any, ...], leaf: Any) -> T:
        names, shape = names_of(path), np.shape(leaf)
        tables = [weights if themselves is None else themselves, *[weights] * len(names)]
        matches = (table.get(names[k:]) for k, table in enumerate(tables))
        return next((sharding for own, sharding in filter(None, matches) if own == shape), rest)

    return jax.tree.map_with_path(followed, tree)


def names_of(path: Sequence[Any]) -> KeyNames:
    """Return a path's keys as plain names, so that a dict's key equals a named tuple's field."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def weights_of(shardings: tuple[Any, ...], shapes: Sequence[tuple[int, ...]], differentiated: frozenset[int]) -> Weights[Any]:
    """Return the shapes of a plan's weights, and their shardings or numbers, by their paths inside of their argument.

    Where several arguments are weights, each weight is also listed with its argument's place among them in front, as an optimizer
    of all of them sees it. A path that two arguments have is then listed only that way.
    """
    weights: dict[KeyNames, tuple[tuple[int, ...], Any]] = {}
    ambiguous: set[KeyNames] = set()
    leaves = jax.tree.leaves_with_path(shardings)
    chosen = [k for k in range(len(leaves)) if not differentiated or k in differentiated]
    arguments = list(dict.fromkeys(leaves[k][0][0] for k in chosen))
    for k in chosen:
        path, sharding = leaves[k]
        names = names_of(path[1:])
        ambiguous |= {names} & weights.keys()
        weights[names] = (shapes[k], sharding)
        if len(arguments) > 1:
            weights[(str(arguments.index(path[0])), *names)] = (shapes[k], sharding)
    return {names: weight for names, weight in weights.items() if names not in ambiguous}
