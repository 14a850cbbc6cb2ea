"""Where the leaves lie of a tree that follows the weights: an optimizer's state, whose moments lie as their weights do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding

Names: TypeAlias = tuple[str, ...]  # of the keys that lead to a leaf
Placed: TypeAlias = Mapping[Names, tuple[tuple[int, ...], NamedSharding]]


def following(tree: Any, weights: Placed, rest: NamedSharding) -> Any:
    """Shardings of a tree's leaves, which may be arrays or `jax.ShapeDtypeStruct`s.

    A leaf follows the weight by whose keys its own end, if it has its shape: `state[0].mu["w"]` follows `params["w"]`. So do the
    states of optimizers for some of the weights. All others (counts, factored moments) have `rest`.
    """

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names, shape = names_of(path), np.shape(leaf)
        found = (weights.get(names[k:]) for k in range(len(names) + 1))
        return next((sharding for own, sharding in filter(None, found) if own == shape), rest)

    return jax.tree.map_with_path(one, tree)


def names_of(path: Sequence[Any]) -> Names:
    """A path's keys as JAX writes them: trees that keep them otherwise (a dict for a named tuple) are found all the same."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def weights_of(shardings: tuple[Any, ...], shapes: Sequence[tuple[int, ...]], differentiated: frozenset[int]) -> Placed:
    """The weights of a plan, by their names inside of their argument. Where several arguments are weights, also by the argument's
    place among them, as an optimizer of all sees them; what is then said twice is said by that alone."""
    found: dict[Names, tuple[tuple[int, ...], NamedSharding]] = {}
    twice: set[Names] = set()
    leaves = jax.tree.leaves_with_path(shardings)
    chosen = [k for k in range(len(leaves)) if not differentiated or k in differentiated]
    arguments = list(dict.fromkeys(leaves[k][0][0] for k in chosen))
    for k in chosen:
        path, sharding = leaves[k]
        names = names_of(path[1:])
        twice |= {names} & found.keys()
        found[names] = (shapes[k], sharding)
        if len(arguments) > 1:
            found[(str(arguments.index(path[0])), *names)] = (shapes[k], sharding)
    return {names: one for names, one in found.items() if names not in twice}
