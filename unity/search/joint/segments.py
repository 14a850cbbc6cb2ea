"""Level 1: a program as a chain of segments, cut where few values cross (Unity, section 5.3). Equal segments are one problem.

A cut is a place in the program's order. A value crosses it if it is produced before and read after it; arguments and constants do
not count. A place that only a residual stream crosses is its post-dominator. A long-lived value such as a mask crosses all places
and so makes no difference, and a result without a reader, such as a batch norm's new averages, crosses none.

Equations that produce random keys are in no segment, nor are constants, so layers that differ only in their keys are equal. So are
layers that differ in the index of their piece of stacked weights: those that cut out pieces are in no segment if that makes
segments equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp

from unity.pcg.analysis.pieces import pieces
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.capture.merging import TINY
from unity.pcg.ir.dead_code import extract
from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor
from unity.substitutions.rewriting.rewriting import content_key

LEAST = 24  # the fewest equations of a segment
AROUND = 6  # equations on each side of a place that identify it
MOST = 3  # the most values that cross a cut, unless segments would be too long
KEY = 16  # the largest size of a random key that is an array of integers
LONG = 8 * LEAST  # the fewest equations of a segment that is cut even where many values cross


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive equations as a separate program; `inputs` and `outputs` are variables of the whole program."""

    body: Body
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    differentiated: frozenset[int]  # inputs of the body, by number, into which gradients flow

    @cached_property
    def key(self) -> str:
        """A key that is equal for segments that are the same problem."""
        return f"{content_key(self.body)} {sorted(self.differentiated)}"


def segments(body: Body, differentiated: Collection[int], least: int = LEAST) -> tuple[Segment, ...]:
    """Return the segments of a program, in order.

    Args:
        body: The program.
        differentiated: The inputs, by number, whose gradients are wanted.
        least: The fewest equations of a segment.
    """
    constant = constants(body)
    left_out = shared(body, constant)
    cutting = _cutting(body)
    flowing, last = flows(body, differentiated), last_uses(body)

    def without(equations: Collection[int]) -> tuple[Segment, ...]:
        remaining = [i for i in range(len(body.equations)) if i not in equations]
        ends = itertools.pairwise([0, *cuts(body, remaining, least), len(remaining)])
        return tuple(part(body, remaining[start:end], constant, flowing, last) for start, end in ends if start < end)

    candidates = [without(left_out), *([without(left_out | cutting)] if cutting else [])]
    return min(candidates, key=lambda segments: len({segment.key for segment in segments}))


def _cutting(body: Body) -> frozenset[int]:
    """Return the equations that cut arguments into pieces."""
    return frozenset(i for piece in pieces(body).values() for i in piece.equations)


def shared(body: Body, constant: Mapping[int, int]) -> frozenset[int]:
    """Return the equations that are in no segment: those of constants, and those that compute random keys from keys alone.

    An input that consists of integers and is small enough for a key counts as a key; so do a few integers computed from keys.
    """
    sources = {*constant, *(v for v in body.inputs if _may_be_key(body.tensors[v], KEY))}
    equations: set[int] = set()
    for i, e in enumerate(body.equations):
        keys = bool(e.results) and all(_may_be_key(body.tensors[v], TINY) for v in e.results)
        if (e.results and e.results[0] in constant) or (keys and all(a in sources for a in e.operands if isinstance(a, int))):
            equations.add(i)
            sources.update(e.results)
    return frozenset(equations)


def _may_be_key(tensor: Tensor, most: int) -> bool:
    return not tensor.floating and (tensor.nbytes <= most or jnp.issubdtype(tensor.dtype, jax.dtypes.prng_key))


def part(
    body: Body, chosen: Sequence[int], constant: Mapping[int, int], flowing: Collection[int], last: Mapping[int, int] | None = None
) -> Segment:
    """Return equations as a segment.

    Args:
        body: The whole program.
        chosen: The equations, by number, in order.
        constant: The equations that compute constants, by variable.
        flowing: The variables that gradients flow into (see `flows`).
        last: The last use of every variable (see `last_uses`).
    """
    last = last_uses(body) if last is None else last
    results = [v for i in chosen for v in body.equations[i].results]
    outputs = tuple(v for v in results if last.get(v, -1) > chosen[-1])
    program, inputs = extract(body, chosen, outputs, constant)
    return Segment(program, inputs, outputs, frozenset(k for k, v in enumerate(inputs) if v in flowing))


def cuts(body: Body, equations: Sequence[int], least: int) -> list[int]:
    """Return the places between some equations where few values cross, at a distance of at least `least`."""
    return places(crossing(body, equations), [body.equations[i].signature for i in equations], least)


def places(crossing: Sequence[int], signatures: Sequence[str], least: int) -> list[int]:
    """Return places in a sequence of operators where few values cross, at a distance of at least `least`.

    Places with equal surroundings are taken together, so that every copy of a repeated layer is cut at the same place: first those
    that the fewest values cross, among these the most frequent. Where more than `MOST` values cross everywhere, as tables and masks
    do, only segments that would be too long are cut.

    Args:
        crossing: The number of values that cross each place.
        signatures: The signatures of the operators.
        least: The least distance of two places.
    """
    groups: dict[tuple, list[int]] = {}
    for p in range(least, len(signatures) - least + 1):
        around = tuple(signatures[p - AROUND : p + AROUND])
        groups.setdefault((crossing[p], around), []).append(p)
    cut_places: list[int] = []
    for (count, _), equal in sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1]), item[1])):
        if count > MOST and cut_places:
            ends = [0, *sorted(cut_places), len(signatures)]
            too_long = [(a, b) for a, b in itertools.pairwise(ends) if b - a > LONG]
            if not too_long:
                break
            equal = [p for p in equal if any(a < p < b for a, b in too_long)]
        for p in equal:
            if all(abs(p - q) >= least for q in cut_places):
                cut_places.append(p)
    return sorted(cut_places)


def crossing(body: Body, equations: Sequence[int]) -> list[int]:
    """Return the number of values that cross each place."""
    place = {i: k for k, i in enumerate(equations)}
    changes = [0] * (len(equations) + 2)
    last = _last_reads(body)
    for i in equations:
        for v in body.equations[i].results:
            until = place.get(last.get(v, -1), -1)
            if until > place[i]:
                changes[place[i] + 1] += 1
                changes[until + 1] -= 1
    total, counts = 0, []
    for change in changes[: len(equations) + 1]:
        total += change
        counts.append(total)
    return counts


def last_uses(body: Body) -> Mapping[int, int]:
    """Return the last equation that reads each variable; for results of the program, the number of equations."""
    return _last_reads(body) | {a: len(body.equations) for a in body.outputs if isinstance(a, int)}


def _last_reads(body: Body) -> dict[int, int]:
    """Return the last equation that reads each variable."""
    return {a: i for i, e in enumerate(body.equations) for a in e.operands if isinstance(a, int)}


def flows(body: Body, differentiated: Collection[int]) -> set[int]:
    """Return the variables that depend on a differentiated input through floating-point values."""
    flowing = {v for k, v in enumerate(body.inputs) if k in differentiated}
    for e in body.equations:
        if any(isinstance(a, int) and a in flowing for a in e.operands):
            flowing.update(v for v in e.results if body.tensors[v].floating)
    return flowing


def joined(body: Body, parts: Sequence[Segment], changed: Mapping[str, Body]) -> Body:
    """Return the whole program with the segments whose keys are in `changed` replaced by those programs."""
    tensors = dict(body.tensors)
    number = max(tensors, default=-1) + 1
    names: dict[int, Atom] = {}
    inside = {v for part in parts for e in part.body.equations for v in e.results}
    left_out = {i for i in _cutting(body) if inside.isdisjoint(body.equations[i].results)} | shared(body, constants(body))
    equations: list[Equation] = [body.equations[i] for i in sorted(left_out)]
    for part in parts:
        new = changed.get(part.key, part.body)
        local: dict[int, Atom] = {v: names.get(w, w) for v, w in zip(new.inputs, part.inputs, strict=True)}
        for e in new.equations:
            results = tuple(range(number, number + len(e.results)))
            number += len(results)
            local.update(zip(e.results, results, strict=True))
            tensors.update((v, new.tensors[w]) for v, w in zip(results, e.results, strict=True))
            equations.append(replace(e, operands=tuple(_renamed(local, a) for a in e.operands), results=results))
        names.update((v, _renamed(local, a)) for v, a in zip(part.outputs, new.outputs, strict=True))
    return Body(body.inputs, tuple(_renamed(names, a, True) for a in body.outputs), tuple(equations), tensors)


def _renamed(names: Mapping[int, Atom], a: Atom, lenient: bool = False) -> Atom:
    if isinstance(a, Literal):
        return a
    return names.get(a, a) if lenient else names[a]
