"""Facts that tasks are made of (`exchange`), given degrees: blocks of numbers, each beginning with its length.

    operator    length, P pieces, whether it runs backward, how many reductions, and these: groups, size, whether backward too,
                bytes, groups * size pieces; P names of what ends each piece, P of what ends it backward, P devices
    operand     length, n pairs of pieces that share elements, how many parts of which several pieces of the maker hold the same
                one (0: none do); n pieces of the maker, n of the reader, n times elements, n parts
    weight      length, how many parts, of each how many devices hold it, and its bytes; these devices, by number
    waiting     length, how many pairs forward, how many backward, and these: a piece, and the name of what it waits for

Bytes are the bits of floating-point numbers (`records`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from unity.baselines.flexflow.delta.columns import Numbers
from unity.baselines.flexflow.strategy.operators import Reduction
from unity.baselines.flexflow.strategy.pieces import Slices, overlap
from unity.baselines.flexflow.strategy.records import bits
from unity.baselines.flexflow.strategy.regions import Readers, shared_by_number

OPERATOR, REDUCTION, OPERAND, WEIGHT, WAITING = 4, 4, 3, 2, 3  # numbers before those of pieces or parts


def operator(pieces: int, backward: bool, reductions: Sequence[Reduction]) -> Numbers:
    """An operator's block but for its pieces' devices, which are its end."""
    found = [np.zeros(0, np.int64)]
    for r in reductions:
        found += [np.array([*r.groups.shape, r.backward], np.int64), bits(np.array([r.nbytes])), r.groups.ravel()]
    facts = np.concatenate(found)
    head = np.array([OPERATOR + len(facts) + 3 * pieces, pieces, backward, len(reductions)], np.int64)
    return np.concatenate((head, facts, np.zeros(2 * pieces, np.int64)))


@lru_cache(maxsize=65536)
def operand(made: Slices, read: Slices) -> Numbers:
    """The block of an operand that is cut so by what makes and by what reads it."""
    first, second, elements = overlap(made, read)
    parts = made.slices if made.copied else 0
    rows = [first, second, elements, made.slice_of[first]][: 4 if parts else 3]
    return np.concatenate((np.array([OPERAND + len(rows) * len(first), len(first), parts], np.int64), *rows))


@lru_cache(maxsize=4096)
def weight(readers: Readers, itemsize: int) -> Numbers:
    """The block of a weight with elements of so many bytes. `readers`: on devices by number (`regions.numbered`)."""
    found = shared_by_number(readers)
    head = np.array([WEIGHT + 2 * len(found.counts) + len(found.devices), len(found.counts)], np.int64)
    return np.concatenate((head, found.counts, bits(itemsize * found.elements), found.devices))
