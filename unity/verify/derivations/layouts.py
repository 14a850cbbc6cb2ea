"""Rearrangements taken apart and put together: which parts of a tensor make up each dimension that it is seen with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from unity.pcg.types.parallel_type import Shape
from unity.substitutions.language.rearrangement import Rearrangement, after, reshaped, transposed, unchanged

Part = tuple[int, tuple[int, ...]]  # its size, and its place: parts of a tensor lie in the order of their places


@lru_cache(maxsize=65536)
def boxed(source: Shape, sizes: Shape, permutation: tuple[int, ...], target: Shape) -> Rearrangement:
    """See the elements of `source` as a box of `sizes`, permute it, see that as `target`."""
    turned = transposed(sizes, permutation)
    whole = after(turned, reshaped(source, sizes))
    whole = after(reshaped(turned.target, target), whole) if whole is not None else None
    assert whole is not None
    return whole


def well_formed(view: Rearrangement) -> bool:
    """Whether its parts fit together as those made here do. One that was read from a file need not be a rearrangement at all."""
    numbers = (*view.source, *view.sizes, *view.target)
    return (
        all(n >= 0 for n in numbers)
        and prod(view.source) == prod(view.sizes) == prod(view.target)
        and sorted(view.permutation) == list(range(len(view.sizes)))
        and boxed(view.source, view.sizes, view.permutation, view.target) == view
    )


@lru_cache(maxsize=65536)
def lifted(n: int, view: Rearrangement) -> Rearrangement:
    """The same rearrangement behind one more leading dimension, which stays."""
    permutation = (0, *(p + 1 for p in view.permutation))
    return boxed((n, *view.source), (n, *view.sizes), permutation, (n, *view.target))


@lru_cache(maxsize=65536)
def beside(views: tuple[Rearrangement, ...]) -> Rearrangement:
    """Rearrangements of one dimension each, as one of them all."""
    sizes = tuple(n for v in views for n in v.sizes)
    starts = [sum(len(v.sizes) for v in views[:k]) for k in range(len(views))]
    permutation = tuple(start + p for start, v in zip(starts, views, strict=True) for p in v.permutation)
    return boxed(
        tuple(n for v in views for n in v.source), sizes, permutation, tuple(n for v in views for n in v.target)
    )  # fmt: skip


@lru_cache(maxsize=65536)
def parts(view: Rearrangement) -> tuple[tuple[Part, ...], ...] | None:
    """Of which parts of the source every dimension of the target is made, in their order. None where one is cut unevenly, or there
    are no elements."""
    if 0 in view.sizes:
        return None
    rest: list[Part] = [(view.sizes[p], (p,)) for p in reversed(view.permutation)]
    found: list[tuple[Part, ...]] = []
    for n in view.target:
        mine: list[Part] = []
        while n > 1:
            size, place = rest.pop()
            if size > n:
                if size % n:
                    return None
                rest.append((size // n, (*place, 1)))
                size, place = n, (*place, 0)
            if n % size:
                return None
            mine.append((size, place))
            n //= size
        found.append(tuple(mine))
    return tuple(found)


@lru_cache(maxsize=65536)
def in_order(mine: tuple[Part, ...]) -> Rearrangement:
    """What brings a dimension's parts into the order in which they lie in the source."""
    n = prod(size for size, _ in mine)
    order = tuple(sorted(range(len(mine)), key=lambda k: mine[k][1]))
    return boxed((n,), tuple(size for size, _ in mine), order, (n,))


def still(n: int) -> Rearrangement:
    """A dimension as it is."""
    return unchanged((n,))


def ordering(view: Rearrangement, dims: Sequence[int]) -> dict[int, Rearrangement]:
    """For some dimensions of the target, what brings their parts into the order in which they lie in the source."""
    found = parts(view)
    return {d: in_order(found[d]) if found is not None else still(view.target[d]) for d in dims}
