"""The plans of a body whose equations are operators of their own, by enumeration, and those of the body as one operator.

Independent of how a body is solved: every equation has the choices that it has alone, and between two equations a value may change
from one type to another. Both are priced alike: bytes on the wire, and work, on a machine without latency.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf, prod
from typing import Any

from unity.pcg.ir.gradient_flow import carrying
from unity.pcg.ir.program import Body, Equation, Tensor
from unity.pcg.parallel.resharding import steps
from unity.pcg.propagation.choice import Choice, part_of_work
from unity.pcg.propagation.choices import choices_with_moves
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, Type, misfit, partitioned, slice_count

Types = tuple[Type, ...]
Boundary = tuple[Types, Types]  # of operands and results
GATHER, SCATTER, REDUCE, EXCHANGE = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
COLLECTIVES = {  # of every change of type, forward and backward (docs/types.md)
    "partition": ("", GATHER), "combine": (GATHER, ""), "replicate": ("", REDUCE), "unreplicate": ("", ""), "reduce": (REDUCE, ""),
    "reduce_partition": (SCATTER, GATHER), "combine_replicate": (GATHER, SCATTER), "combine_partition": (EXCHANGE, EXCHANGE),
    "contribute": ("", ""),
}  # fmt: skip
# The changes of state that a body may make inside as one operator, by kinds: values are reduced, replicated or contributed to sums.
INSIDE = frozenset({"SU", "SR", "UR", "RU", "US", "RS"})
# The others, where no operand is partitioned: values are reduced, scattered or replicated.
SCATTERED = frozenset({"SU", "SR", "SP", "UR", "RU"})


@dataclass(frozen=True)
class Prices:
    """Seconds of a byte on the wire and of a unit of work, in training or not.

    With `rounded`, sums of every type are added in that type, as with `reduce_in`; otherwise in none narrower than float32.
    """

    axes: tuple[Axis, ...]
    byte: float = 1.0
    work: float = 1.0
    training: bool = True
    rounded: bool = False

    def summed(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor that is summed over devices."""
        if self.rounded or not tensor.floating:
            return tensor.nbytes
        return tensor.nbytes * max(tensor.itemsize, 4) // tensor.itemsize

    def collective(self, kind: str, over: Collection[int], nbytes: float) -> float:
        """Return the seconds of a collective over some axes with `nbytes` bytes on its full side."""
        n = prod(self.axes[k].size for k in over)
        return self.byte * nbytes * (n - 1) / n * (2 if kind == REDUCE else 1)

    def change(self, before: Type, after: Type, tensor: Tensor, gradient: bool) -> float:
        """Return the seconds of a change of type, forward and backward."""
        total = 0.0
        for step in steps(before, after, self.axes):
            there, back = COLLECTIVES[step.kind]
            pieces = [slice_count(step.before, self.axes), slice_count(step.after, self.axes)]
            pieces = pieces[0] if there == EXCHANGE else min(pieces)
            over = [k for k in step.axes if step.kind != "partition" or step.before[k] == UNUSED]
            nbytes = {
                kind: (self.summed(tensor) if kind in (REDUCE, SCATTER) else tensor.nbytes) / pieces for kind in (there, back)
            }
            total += self.collective(there, step.axes, nbytes[there]) if there else 0.0
            total += self.collective(back, over, nbytes[back]) if back and over and gradient and self.training else 0.0
        return total

    def operator(self, body: Body, along: Sequence[Choice]) -> float:
        """Return the seconds of an operator's work and of its own collectives, given its choice along each axis."""
        flops = sum(1.0 + (spec.flops if (spec := spec_of(body, e)) else 0.0) for e in body.equations)
        total = self.work * flops * prod(part_of_work(c.divided, a.size) for c, a in zip(along, self.axes, strict=True))
        carried = carrying(body, (True,) * len(body.inputs), (True,) * len(body.outputs)) if self.training else frozenset()
        for v in {v for c in along for r in c.reduced if isinstance(v := r.variable, int)}:
            of_axis = [next((r for r in c.reduced if r.variable == v), None) for c in along]
            pieces = prod(a.size for c, a in zip(along, self.axes, strict=True) if v in c.partitions)
            kinds = {r.kind for r in of_axis if r is not None and r.kind}
            over = [k for k, r in enumerate(of_axis) if r is not None and r.kind]
            full = self.summed(body.tensors[v]) / pieces
            total += self.collective(REDUCE, over, full if kinds == {"sum"} else body.tensors[v].nbytes / pieces)
            users = {u for r in of_axis if r is not None for u in r.users}
            masks = {tuple(k for k, r in enumerate(of_axis) if r is not None and u in r.users) for u in users}
            total += sum(self.collective(REDUCE, mask, full) for mask in masks if v in carried)
        for v in {x.variable for c in along for x in c.scattered if x.moves}:
            before, after = zip(*(c.around_scatter(v) for c in along), strict=True)
            total += self.change(before, after, body.tensors[v], v in carried)
        return total


def combinations(body: Body, axes: Sequence[Axis]) -> Iterator[tuple[Choice, ...]]:
    """Yield a choice for each axis, in all ways that fit the body's operands and results."""
    tensors = [body.tensor(a) for a in (*body.inputs, *body.outputs)]
    for along in product(choices_with_moves(body), repeat=len(axes)):
        degrees = {id(c): prod(a.size for d, a in zip(along, axes, strict=True) if d is c) for c in along}
        types = zip(*(c.states for c in along), strict=True)
        fits = all(misfit(t.shape, type_, axes) is None for t, type_ in zip(tensors, types, strict=True))
        if fits and all(c.size % degrees[id(c)] == 0 for c in along):
            yield along


def types_along(along: Sequence[Choice]) -> tuple[Types, Types]:
    """Return the types of an operator's operands and results, given its choice along each axis."""
    return tuple(zip(*(c.operands for c in along), strict=True)), tuple(zip(*(c.results for c in along), strict=True))


def types_of(tensor: Tensor, axes: Sequence[Axis]) -> list[Type]:
    """Return all types of a tensor without inner digits."""
    states = [UNUSED, REPLICATED, *([PARTIAL] if tensor.floating else []), *map(partitioned, range(len(tensor.shape)))]
    return [t for t in product(states, repeat=len(axes)) if misfit(tensor.shape, t, axes) is None]


class Separate:
    """The equations of a body as operators of their own."""

    def __init__(self, body: Body, prices: Prices, inside: Collection[str] = INSIDE) -> None:
        self.body, self.prices, self.inside = body, prices, inside
        self.carried = carrying(body, (True,) * len(body.inputs), (True,) * len(body.outputs))
        self.changes: dict[tuple[int, Type, Type], float] = {}
        self.last = {a: i for i, e in enumerate(body.equations) for a in e.operands if isinstance(a, int)}

    @cached_property
    def plans(self) -> Mapping[Boundary, float]:
        """The seconds of the fastest plan for every combination of types of the operands and of the results."""
        start = product(*(types_of(self.body.tensors[v], self.prices.axes) for v in self.body.inputs))
        frontier = {(s, tuple((v, t, frozenset({t})) for v, t in zip(self.body.inputs, s, strict=True)), ()): 0.0 for s in start}
        for i, e in enumerate(self.body.equations):
            following: dict[Any, float] = {}
            ways = list(self.ways(e))
            for (operands, live, results), seconds in frontier.items():
                for after, more, duration in self.extended(i, e, live, ways):
                    key = operands, after, results + more
                    following[key] = min(seconds + duration, following.get(key, inf))
            frontier = following
        plans: dict[Boundary, float] = {}
        for (operands, _, results), seconds in frontier.items():
            types = dict(results) | dict(zip(self.body.inputs, operands, strict=True))
            boundary = operands, tuple(types[a] for a in self.body.outputs if isinstance(a, int))
            plans[boundary] = min(seconds, plans.get(boundary, inf))
        return plans

    def ways(self, e: Equation) -> Iterator[tuple[Types, Types, float]]:
        """Yield the types of an equation's distinct operands and results in each combination of choices, with its seconds."""
        inputs = tuple(dict.fromkeys(a for a in e.operands if isinstance(a, int)))
        alone = Body(inputs, e.results, (e,), {v: self.body.tensors[v] for v in (*inputs, *e.results)})
        for along in combinations(alone, self.prices.axes):
            yield *types_along(along), self.prices.operator(alone, along)

    def extended(self, i: int, e: Equation, live: Any, ways: list) -> Iterator[tuple[Any, Any, float]]:
        """Yield the live values after an equation, the types of results of the body, and the equation's seconds.

        A live value has the type that it is produced in, and those into which it is changed for its users, each once.
        """
        known = {v: (produced, there) for v, produced, there in live}
        inputs = tuple(dict.fromkeys(a for a in e.operands if isinstance(a, int)))
        for operands, results, seconds in ways:
            there, total = dict(known), seconds
            changes = [(a, known[a][0], t) for a, t in zip(inputs, operands, strict=True) if t not in known[a][1]]
            if not all(self.is_possible(before, after) for _, before, after in changes):
                continue
            for a, before, after in changes:
                total += self.change(a, before, after)
                there[a] = before, known[a][1] | {after}
            there.update((v, (t, frozenset({t}))) for v, t in zip(e.results, results, strict=True))
            kept = tuple((v, *x) for v, x in there.items() if self.last.get(v, -1) > i)
            yield kept, tuple((v, t) for v, t in zip(e.results, results, strict=True) if v in self.body.outputs), total

    def change(self, variable: int, before: Type, after: Type) -> float:
        """Return the seconds of a change of type of a variable."""
        key = variable, before, after
        if key not in self.changes:
            self.changes[key] = self.prices.change(before, after, self.body.tensors[variable], variable in self.carried)
        return self.changes[key]

    def is_possible(self, before: Type, after: Type) -> bool:
        """Return whether a value may change its type between two equations."""
        return all(s == t or s.kind + t.kind in self.inside for s, t in zip(before, after, strict=True))


def lost(
    body: Body, prices: Prices, inside: Collection[str] | None = None, undivided: bool = False
) -> Iterator[tuple[Boundary, float, float]]:
    """Yield the plans of separate equations that are faster than every choice of the body, with changes of type around it.

    Each comes with its seconds and those of the best choice. Plans that are faster by less than 5 %, or by less than some
    thousandths of the largest tensor, are left out, and, unless `undivided`, those that divide nothing. Between equations values
    change as in `inside`, or as they may in an operator.
    """
    separate = Separate(body, prices, inside or INSIDE)
    plans = dict(separate.plans)
    if inside is None:
        scattered = Separate(body, prices, SCATTERED).plans.items()
        plans |= {boundary: s for boundary, s in scattered if not any(t.kind == "P" for operand in boundary[0] for t in operand)}
    offers = [(*types_along(along), prices.operator(body, along)) for along in combinations(body, prices.axes)]
    outputs = [(k, a) for k, a in enumerate(body.outputs) if isinstance(a, int)]
    slack = prices.byte * max(body.tensor(a).nbytes for a in (*body.inputs, *body.outputs)) * 4 / 1024
    for (operands, results), seconds in plans.items():
        divides = any(s.kind == "P" for t in operands + results for s in t) or any(PARTIAL in t for t in results)
        if not (divides or undivided):
            continue
        best = inf
        for before, after, total in offers:
            for v, s, t in zip(body.inputs, operands, before, strict=True):
                total += separate.change(v, s, t)
            for (k, a), t in zip(outputs, results, strict=True):
                total += separate.change(a, after[k], t)
            best = min(best, total)
        if best > seconds * 1.05 + slack:
            yield (operands, results), seconds, best
