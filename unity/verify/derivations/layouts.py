"""Construction of rearrangements, and their decomposition: the parts of the source that make up each dimension of the target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from unity.pcg.types.parallel_type import Shape
from unity.substitutions.language.rearrangement import Rearrangement, after, reshaped, transposed, unchanged

Part = tuple[int, tuple[int, ...]]  # its size and its place; in the source, parts are ordered by their places


@lru_cache(maxsize=65536)
def boxed(source: Shape, sizes: Shape, permutation: tuple[int, ...], target: Shape) -> Rearrangement:
    """Return the rearrangement that reshapes `source` to `sizes`, permutes it, and reshapes it to `target`."""
    transposition = transposed(sizes, permutation)
    view = after(transposition, reshaped(source, sizes))
    view = after(reshaped(transposition.target, target), view) if view is not None else None
    assert view is not None
    return view


def well_formed(view: Rearrangement) -> bool:
    """Return whether a rearrangement that was read from a file is one: consistent, and in the form that `boxed` gives it."""
    numbers = (*view.source, *view.sizes, *view.target)
    return (
        all(n >= 0 for n in numbers)
        and prod(view.source) == prod(view.sizes) == prod(view.target)
        and sorted(view.permutation) == list(range(len(view.sizes)))
        and boxed(view.source, view.sizes, view.permutation, view.target) == view
    )


@lru_cache(maxsize=65536)
def lifted(n: int, view: Rearrangement) -> Rearrangement:
    """Return a rearrangement with one more leading dimension, of size n, which it leaves in place."""
    permutation = (0, *(p + 1 for p in view.permutation))
    return boxed((n, *view.source), (n, *view.sizes), permutation, (n, *view.target))


@lru_cache(maxsize=65536)
def beside(views: tuple[Rearrangement, ...]) -> Rearrangement:
    """Combine rearrangements of separate groups of dimensions into one, side by side."""
    sizes = tuple(n for v in views for n in v.sizes)
    starts = [sum(len(v.sizes) for v in views[:k]) for k in range(len(views))]
    permutation = tuple(start + p for start, v in zip(starts, views, strict=True) for p in v.permutation)
    return boxed(
        tuple(n for v in views for n in v.source), sizes, permutation, tuple(n for v in views for n in v.target)
    )  # fmt: skip


@lru_cache(maxsize=65536)
def parts(view: Rearrangement) -> tuple[tuple[Part, ...], ...] | None:
    """Return the parts of the source that make up every dimension of the target, in order.

    None where a part would be cut unevenly, and for a tensor without elements.
    """
    if 0 in view.sizes:
        return None
    remaining: list[Part] = [(view.sizes[p], (p,)) for p in reversed(view.permutation)]
    dimensions: list[tuple[Part, ...]] = []
    for n in view.target:
        dimension: list[Part] = []
        while n > 1:
            size, place = remaining.pop()
            if size > n:
                if size % n:
                    return None
                remaining.append((size // n, (*place, 1)))
                size, place = n, (*place, 0)
            if n % size:
                return None
            dimension.append((size, place))
            n //= size
        dimensions.append(tuple(dimension))
    return tuple(dimensions)


@lru_cache(maxsize=65536)
def in_source_order(dimension: tuple[Part, ...]) -> Rearrangement:
    """Return the rearrangement that brings the parts of a dimension into the order that they have in the source."""
    n = prod(size for size, _ in dimension)
    order = tuple(sorted(range(len(dimension)), key=lambda k: dimension[k][1]))
    return boxed((n,), tuple(size for size, _ in dimension), order, (n,))


def unmoved(n: int) -> Rearrangement:
    """Return the identity of one dimension."""
    return unchanged((n,))


def ordering(view: Rearrangement, dims: Sequence[int]) -> dict[int, Rearrangement]:
    """Return, for some dimensions of the target, the rearrangement of their parts into source order.

    It is the identity where the view has no parts.
    """
    dimensions = parts(view)
    return {d: in_source_order(dimensions[d]) if dimensions is not None else unmoved(view.target[d]) for d in dims}
