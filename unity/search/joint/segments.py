"""Level 1: a program as a chain of segments, cut where little crosses (Unity, section 5.3). Equal segments are one problem.

A cut is a place in the program's order. What crosses it is every value made before and read after, arguments and constants left
out. Where a residual stream is the only thing that crosses, that is its post-dominator; what lives long, as a mask does, crosses
everywhere and so counts nowhere; and a result that nothing reads, as a batch norm's new averages, crosses nothing.

What makes random keys is in no segment, as constants are not: so layers are equal that differ only in their keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp

from unity.pcg.capture.heavy_operators import constants
from unity.pcg.capture.merging import TINY
from unity.pcg.ir.dead_code import extract
from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor
from unity.substitutions.rewriting.rewriting import content_key

LEAST = 24  # equations in a segment
AROUND = 6  # equations on each side by which places are told apart
MOST = 3  # values that may cross, where there are better places at all
KEY = 16  # bytes of the largest key, where it is an array of integers
LONG = 8 * LEAST  # equations in a segment that is cut where more values cross


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive equations as a program of their own; `inputs` and `outputs` are variables of the whole one."""

    body: Body
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    differentiated: frozenset[int]  # inputs of the body, by number, into which gradients flow

    @cached_property
    def key(self) -> str:
        """Equal for segments that are the same problem."""
        return f"{content_key(self.body)} {sorted(self.differentiated)}"


def segments(body: Body, differentiated: Collection[int], least: int = LEAST) -> tuple[Segment, ...]:
    """The segments of a program, in order. `differentiated`: inputs by number whose gradients are wanted."""
    constant = constants(body)
    left_out = shared(body, constant)
    kept = [i for i in range(len(body.equations)) if i not in left_out]
    flowing, last = flows(body, differentiated), _last_uses(body)
    ends = [0, *cuts(body, kept, least), len(kept)]
    return tuple(part(body, kept[start:end], constant, flowing, last) for start, end in itertools.pairwise(ends) if start < end)


def shared(body: Body, constant: Mapping[int, int]) -> frozenset[int]:
    """Equations that are in no segment: of constants, and those that make keys, or few integers, of nothing but keys.

    An input of so few integers that they could be a key is taken for one.
    """
    known = {*constant, *(v for v in body.inputs if _seeds(body.tensors[v], KEY))}
    found: set[int] = set()
    for i, e in enumerate(body.equations):
        seeds = bool(e.results) and all(_seeds(body.tensors[v], TINY) for v in e.results)
        if (e.results and e.results[0] in constant) or (seeds and all(a in known for a in e.operands if isinstance(a, int))):
            found.add(i)
            known.update(e.results)
    return frozenset(found)


def _seeds(tensor: Tensor, most: int) -> bool:
    return not tensor.floating and (tensor.nbytes <= most or jnp.issubdtype(tensor.dtype, jax.dtypes.prng_key))


def part(
    body: Body, chosen: Sequence[int], constant: Mapping[int, int], flowing: Collection[int], last: Mapping[int, int] | None = None
) -> Segment:
    """Consecutive equations, those of constants left out, as a segment. `flowing`: see `flows`; `last`: see `_last_uses`."""
    last = _last_uses(body) if last is None else last
    made = [v for i in chosen for v in body.equations[i].results]
    outputs = tuple(v for v in made if last.get(v, -1) > chosen[-1])
    program, inputs = extract(body, chosen, outputs, constant)
    return Segment(program, inputs, outputs, frozenset(k for k, v in enumerate(inputs) if v in flowing))


def cuts(body: Body, kept: Sequence[int], least: int) -> list[int]:
    """Places between the kept equations where little crosses, no two nearer than `least`."""
    return places(_crossing(body, kept), [body.equations[i].signature for i in kept], least)


def places(crossing: Sequence[int], signatures: Sequence[str], least: int) -> list[int]:
    """Places in a row of operators where few values cross, no two nearer than `least`.

    Places that look alike (the same operators around them) are taken together, so that a repeated layer is cut at one place
    every time: first those where the fewest values cross, of these the most frequent. Where more than a few cross everywhere
    (tables, masks), only what would be long otherwise is cut.
    """
    alike: dict[tuple, list[int]] = {}
    for p in range(least, len(signatures) - least + 1):
        around = tuple(signatures[p - AROUND : p + AROUND])
        alike.setdefault((crossing[p], around), []).append(p)
    found: list[int] = []
    for (count, _), same in sorted(alike.items(), key=lambda item: (item[0][0], -len(item[1]), item[1])):
        if count > MOST and found:
            ends = [0, *sorted(found), len(signatures)]
            too_long = [(a, b) for a, b in itertools.pairwise(ends) if b - a > LONG]
            if not too_long:
                break
            same = [p for p in same if any(a < p < b for a, b in too_long)]
        for p in same:
            if all(abs(p - q) >= least for q in found):
                found.append(p)
    return sorted(found)


def _crossing(body: Body, kept: Sequence[int]) -> list[int]:
    """How many values cross each place."""
    place = {i: k for k, i in enumerate(kept)}
    changes = [0] * (len(kept) + 2)
    last = _last_reads(body)
    for i in kept:
        for v in body.equations[i].results:
            until = place.get(last.get(v, -1), -1)
            if until > place[i]:
                changes[place[i] + 1] += 1
                changes[until + 1] -= 1
    total, found = 0, []
    for change in changes[: len(kept) + 1]:
        total += change
        found.append(total)
    return found


def _last_uses(body: Body) -> Mapping[int, int]:
    """The last equation that reads each variable; the number of equations for what is a result."""
    return _last_reads(body) | {a: len(body.equations) for a in body.outputs if isinstance(a, int)}


def _last_reads(body: Body) -> dict[int, int]:
    """The last equation that reads each variable."""
    return {a: i for i, e in enumerate(body.equations) for a in e.operands if isinstance(a, int)}


def flows(body: Body, differentiated: Collection[int]) -> set[int]:
    """Variables that depend on a differentiated input by floating-point numbers."""
    found = {v for k, v in enumerate(body.inputs) if k in differentiated}
    for e in body.equations:
        if any(isinstance(a, int) and a in found for a in e.operands):
            found.update(v for v in e.results if body.tensors[v].floating)
    return found


def joined(body: Body, parts: Sequence[Segment], changed: Mapping[str, Body]) -> Body:
    """The whole program again, where segments with a key of `changed` are those programs instead."""
    tensors = dict(body.tensors)
    number = max(tensors, default=-1) + 1
    names: dict[int, Atom] = {}
    equations: list[Equation] = [body.equations[i] for i in sorted(shared(body, constants(body)))]
    for part in parts:
        new = changed.get(part.key, part.body)
        local: dict[int, Atom] = {v: names.get(w, w) for v, w in zip(new.inputs, part.inputs, strict=True)}
        for e in new.equations:
            results = tuple(range(number, number + len(e.results)))
            number += len(results)
            local.update(zip(e.results, results, strict=True))
            tensors.update((v, new.tensors[w]) for v, w in zip(results, e.results, strict=True))
            equations.append(replace(e, operands=tuple(_in(local, a) for a in e.operands), results=results))
        names.update((v, _in(local, a)) for v, a in zip(part.outputs, new.outputs, strict=True))
    return Body(body.inputs, tuple(_in(names, a, True) for a in body.outputs), tuple(equations), tensors)


def _in(names: Mapping[int, Atom], a: Atom, lenient: bool = False) -> Atom:
    if isinstance(a, Literal):
        return a
    return names.get(a, a) if lenient else names[a]
