"""Rearrangements: the canonical form of a chain of reshapes and transposes.

A rearrangement reshapes a tensor to a box of `sizes`, permutes the box, and reshapes it to `target`. Two chains are equal functions
exactly if their rearrangements are equal, so that rules match through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import jax
import jax.numpy as jnp

from unity.pcg.types.parallel_type import Shape


@dataclass(frozen=True)
class Rearrangement:
    """A permutation of elements, from shape `source` to shape `target`.

    The box has as few dimensions as possible, none of size one. The functions of this module construct rearrangements in this
    canonical form.
    """

    source: Shape
    sizes: Shape
    permutation: tuple[int, ...]
    target: Shape

    @property
    def identity(self) -> bool:
        """Whether neither the elements' order nor the shape changes."""
        return self.reshape and self.source == self.target

    @property
    def reshape(self) -> bool:
        """Whether the elements' order does not change."""
        return len(self.sizes) <= 1

    def inverse(self) -> Rearrangement:
        """Return the inverse rearrangement."""
        back = [0] * len(self.permutation)
        for k, p in enumerate(self.permutation):
            back[p] = k
        return Rearrangement(self.target, tuple(self.sizes[p] for p in self.permutation), tuple(back), self.source)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return an array rearranged."""
        if self.identity:
            return x
        if self.reshape:
            return x.reshape(self.target)
        box = x if x.shape == self.sizes else x.reshape(self.sizes)
        permuted = jnp.transpose(box, self.permutation)
        return permuted if permuted.shape == self.target else permuted.reshape(self.target)


@lru_cache(maxsize=65536)
def reshaped(source: Shape, target: Shape) -> Rearrangement:
    """Return the rearrangement of a reshape."""
    return _canonical(source, (prod(source),), (0,), target)


@lru_cache(maxsize=65536)
def transposed(source: Shape, permutation: tuple[int, ...]) -> Rearrangement:
    """Return the rearrangement of a transpose, as `jnp.transpose` does it."""
    return _canonical(source, source, permutation, tuple(source[p] for p in permutation))


def unchanged(shape: Shape) -> Rearrangement:
    """Return the identity of a shape."""
    return reshaped(shape, shape)


@lru_cache(maxsize=65536)
def after(second: Rearrangement, first: Rearrangement) -> Rearrangement | None:
    """Return the rearrangement that applies `first`, then `second`, or None if no single rearrangement does.

    None does if the two divide a dimension at positions of which neither is a multiple of the other.
    """
    if 0 in first.sizes:
        return _of_nothing(first.source, second.target)
    middle = tuple(first.sizes[p] for p in first.permutation)
    parts = _common(middle, second.sizes)
    if parts is None:
        return None
    of_first, of_second = parts
    # Number the parts in the order of the middle; `begin` lists them in the order of the first box, `end` in the final one.
    places: dict[int, list[int]] = {}
    count = 0
    for k, group in enumerate(of_first):
        places[first.permutation[k]] = list(range(count, count + len(group)))
        count += len(group)
    in_middle = [n for group in of_first for n in group]
    starts = [sum(len(g) for g in of_second[:k]) for k in range(len(of_second))]
    end = [starts[p] + j for p in second.permutation for j in range(len(of_second[p]))]
    begin = [i for k in range(len(places)) for i in places[k]]
    at = {i: k for k, i in enumerate(begin)}
    return _canonical(first.source, tuple(in_middle[i] for i in begin), tuple(at[i] for i in end), second.target)


def _common(a: Shape, b: Shape) -> tuple[list[list[int]], list[list[int]]] | None:
    """Return the coarsest common refinement of two shapes with positive sizes, grouped by the dimensions of each.

    Returns None if they divide a dimension at positions of which neither is a multiple of the other.
    """
    left: list[list[int]] = [[] for _ in a]
    right: list[list[int]] = [[] for _ in b]
    i, j = len(a) - 1, len(b) - 1
    n, m = (a[i] if a else 1), (b[j] if b else 1)
    while i >= 0 and j >= 0:
        part = min(n, m)
        if n % part or m % part:
            return None
        left[i].insert(0, part)
        right[j].insert(0, part)
        n, m = n // part, m // part
        if n == 1:
            i -= 1
            n = a[i] if i >= 0 else 1
        if m == 1:
            j -= 1
            m = b[j] if j >= 0 else 1
    return left, right


def _canonical(source: Shape, sizes: Shape, permutation: tuple[int, ...], target: Shape) -> Rearrangement:
    """Return a rearrangement in canonical form: dimensions of size one dropped, and neighbours that stay neighbours merged."""
    if 0 in sizes:
        return _of_nothing(source, target)
    runs: list[list[int]] = []
    nontrivial = [p for p in permutation if sizes[p] != 1]
    rank = {p: k for k, p in enumerate(sorted(nontrivial))}
    big = [sizes[p] for p in sorted(nontrivial)]
    for p in (rank[p] for p in nontrivial):
        if runs and p == runs[-1][-1] + 1:
            runs[-1].append(p)
        else:
            runs.append([p])
    order = sorted(range(len(runs)), key=lambda r: runs[r])
    place = {r: k for k, r in enumerate(order)}
    return Rearrangement(
        source, tuple(prod(big[p] for p in runs[r]) for r in order), tuple(place[r] for r in range(len(runs))), target
    )


def _of_nothing(source: Shape, target: Shape) -> Rearrangement:
    """Return the only rearrangement of a tensor without elements between two shapes."""
    return Rearrangement(source, (0,), (0,), target)


@dataclass(frozen=True)
class _Atoms:
    """The refinement of a rearrangement in which every part belongs to one dimension of the source and one of the target.

    Parts are numbered in the order of the source. `source` and `target` list the parts of every dimension, in order.
    """

    sizes: Shape
    source: tuple[tuple[int, ...], ...]
    target: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=65536)
def _atoms(view: Rearrangement) -> _Atoms | None:
    """Return a rearrangement's refinement, or None if it has no refinement or the tensor has no elements."""
    if 0 in view.sizes:
        return None
    permuted = tuple(view.sizes[p] for p in view.permutation)
    before, after = _common(view.sizes, view.source), _common(permuted, view.target)
    if before is None or after is None:
        return None
    numbers: list[list[int]] = []  # per dimension of the box, its parts
    sizes: list[int] = []
    for k, mine in enumerate(before[0]):
        both = _common(tuple(mine), tuple(after[0][view.permutation.index(k)]))
        if both is None:
            return None
        finest = [n for group in both[0] for n in group]
        numbers.append(list(range(len(sizes), len(sizes) + len(finest))))
        sizes += finest
    forward = [p for group in numbers for p in group]
    permuted_parts = [p for k in view.permutation for p in numbers[k]]
    return _Atoms(tuple(sizes), _grouped(forward, sizes, view.source), _grouped(permuted_parts, sizes, view.target))


def _grouped(parts: Sequence[int], sizes: Sequence[int], shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Return the parts of every dimension of a shape, from all parts in order."""
    rest, groups = list(parts), []
    for n in shape:
        group: list[int] = []
        while prod(sizes[p] for p in group) < n:
            group.append(rest.pop(0))
        groups.append(tuple(group))
    return tuple(groups)


@lru_cache(maxsize=65536)
def dimensions(view: Rearrangement) -> tuple[tuple[int, ...], ...] | None:
    """Return, for every dimension of the target, the source's dimensions that form it, in order, or None if one is divided.

    Dimensions of size one are omitted. For a tensor without elements the result is None unless the shape does not change.
    """
    if 0 in view.sizes:
        return tuple((d,) if n != 1 else () for d, n in enumerate(view.source)) if view.identity else None
    atoms = _atoms(view)
    if atoms is None:
        return None
    of = {group[0]: (d, group) for d, group in enumerate(atoms.source) if group}
    origins: list[tuple[int, ...]] = []
    for parts in atoms.target:
        dims: list[int] = []
        while parts:
            d, group = of.get(parts[0], (-1, ()))
            if d < 0 or parts[: len(group)] != group:
                return None
            dims.append(d)
            parts = parts[len(group) :]
        origins.append(tuple(dims))
    return tuple(origins)


@lru_cache(maxsize=65536)
def target_dimension(view: Rearrangement, dim: int) -> int | None:
    """Return the dimension of the target that is `dim` of the source, or None if `dim` is merged, divided or of size one."""
    atoms = _atoms(view)
    if atoms is None or not atoms.source[dim]:
        return None
    return next((d for d, parts in enumerate(atoms.target) if parts == atoms.source[dim]), None)


@lru_cache(maxsize=65536)
def resized(view: Rearrangement, dim: int, n: int) -> Rearrangement:
    """Return the rearrangement with a dimension that source and target share (`target_dimension`) changed to size `n` in both."""
    atoms, target = _atoms(view), target_dimension(view, dim)
    assert atoms is not None
    assert target is not None
    first, *others = atoms.source[dim]
    sizes = tuple(n if p == first else 1 if p in others else size for p, size in enumerate(atoms.sizes))
    order = tuple(p for parts in atoms.target for p in parts)
    return _canonical(_with(view.source, dim, n), sizes, order, _with(view.target, target, n))


def _with(shape: Shape, dim: int, n: int) -> Shape:
    return (*shape[:dim], n, *shape[dim + 1 :])
