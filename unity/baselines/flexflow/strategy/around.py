"""What a change of operators' configurations makes anew, whatever the configurations are.

That is said by numbers as well, in a head that the loop reads (`exchange`). How many operators there are; how many of them are
anew, the first; how many weights, operands that are anew, operands that are not, and how many there are of what computes. Then

    operator anew    the names of its first piece's task and of its first barrier
    weight           the name of its first barrier, how many operators read it, and which
    operand anew     who reads it and who makes it, the names of its first transfers forward and backward, whether a gradient
                     flows, and the bytes of an element
    what computes    which operator, which way (0: forward), the name of its first task, whether the backward pass begins there,
                     for how many operands it waits, and which: those that are not anew come after those that are
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unity.baselines.flexflow.delta.columns import Numbers
from unity.baselines.flexflow.strategy.names import BACKWARD, ENDS, FORWARD, GRADIENT, REDUCTIONS, TRANSFERS, WAYS, name_of
from unity.baselines.flexflow.strategy.operators import Edge, Operators


@dataclass(frozen=True)
class Around:
    """Some operators, and all around them of which tasks are made anew if their configurations change.

    Args:
        anew: these operators.
        others: others that they have something to do with.
        weights: by (node, result), what they read that has a gradient.
        edges: operands of theirs, and what others read of theirs.
        kept: the other operands of operators that are to wait for other tasks.
        computing: these, forward (0) or backward (1).
        parts: the first name that there may be of the tasks of each operator that is anew, weight, edge, and of what computes.
        read: where the one operator that is anew reads these weights, if no other reads them.
        head: all that by number.
    """

    anew: tuple[int, ...]
    others: tuple[int, ...]
    weights: tuple[tuple[int, int], ...]
    edges: tuple[Edge, ...]
    kept: tuple[Edge, ...]
    computing: tuple[tuple[int, int], ...]
    parts: tuple[int, ...]
    read: tuple[int, ...] | None
    head: Numbers

    @cached_property
    def names(self) -> tuple[tuple[int, int], ...]:
        """The edges by what reads them, and where."""
        return tuple(e[:2] for e in self.edges)

    @cached_property
    def ordered(self) -> tuple[int, ...]:
        """The same names, in order."""
        return tuple(sorted(self.parts))


def around(o: Operators, anew: Collection[int]) -> Around:
    """What has tasks that depend on some operators' configurations."""
    edges = {e[:2]: e for k in anew for e in (*o.incoming[k], *o.outgoing[k])}
    weights = tuple(dict.fromkeys(w for k in anew for w in o.reads[k]))
    forward = dict.fromkeys((*anew, *(e.reader for e in edges.values())))
    backward = dict.fromkeys((*anew, *(e.maker for e in edges.values() if e.flows)))
    waited = [(e[:2], e) for k in forward for e in o.incoming[k]] + [(e[:2], e) for k in backward for e in o.outgoing[k] if e.flows]
    kept = {name: e for name, e in waited if name not in edges}
    readers = (k for w in weights for k, _ in o.weights[w])
    makers = (e.maker for e in edges.values())  # that of what has no gradient computes nothing anew
    others = tuple(k for k in dict.fromkeys((*forward, *backward, *makers, *readers)) if k not in anew)
    computing = (*((k, 0) for k in forward), *((k, 1) for k in backward))
    shape = (tuple(anew), others, weights, tuple(edges.values()), tuple(kept.values()), computing)
    parts = (
        *(name_of(k, REDUCTIONS) for k in anew),
        *(name_of(node, GRADIENT + r * ENDS) for node, r in weights),
        *(name_of(k, TRANSFERS + p * WAYS) for k, p in edges),
        *(name_of(k, BACKWARD if way else FORWARD) for k, way in computing),
    )
    alone = len(shape[0]) == 1 and all(len(o.weights[w]) == 1 for w in weights)
    read = tuple(p for w in weights for _, p in o.weights[w]) if alone else None
    return Around(*shape, parts, read, np.array([*_head(o, *shape)], np.int64))


def _head(
    o: Operators,
    anew: tuple[int, ...],
    others: tuple[int, ...],
    weights: tuple[tuple[int, int], ...],
    edges: tuple[Edge, ...],
    kept: tuple[Edge, ...],
    computing: tuple[tuple[int, int], ...],
) -> Iterator[int]:
    """See above."""
    at = {k: q for q, k in enumerate((*anew, *others))}
    place = {e[:2]: p for p, e in enumerate((*edges, *kept))}
    yield from (len(at), len(anew), len(weights), len(edges), len(kept), len(computing))
    for k in anew:
        yield from (name_of(k, FORWARD), name_of(k, REDUCTIONS))
    for node, result in weights:
        readers = [at[k] for k, _ in o.weights[node, result]]
        yield from (name_of(node, GRADIENT + result * ENDS), len(readers), *readers)
    for e in edges:
        there, back = (name_of(e.reader, TRANSFERS + e.position * WAYS + way) for way in range(WAYS))
        yield from (at[e.reader], at[e.maker], there, back, e.flows, o.nodes[e.maker].tensors[e.result].itemsize)
    for k, way in computing:
        found = [place[e[:2]] for e in (o.outgoing[k] if way else o.incoming[k]) if e.flows or not way]
        yield from (at[k], way, name_of(k, BACKWARD if way else FORWARD), way and k in o.ends, len(found), *found)
